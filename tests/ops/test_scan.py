"""The scan that most CUDA kernels share (kernels/common/device.cuh): all that it does is needed."""

import pytest

from hvd_deepreduce.ops import bitmap, device
from tests.ops.compare import same, some_indices

FILE = "bitmap/bitmap.cu"


@pytest.mark.parametrize("number", [0, 3, 4])
def test_a_missing_barrier_is_found(gpu, number, monkeypatch):
    """Without one of the scan's barriers, the emulator finds a race. The other three of the six protect a function's
    shared memory from its next call; here another barrier comes in between."""
    if not hasattr(gpu.module, "EmulationError"):
        pytest.skip("only the emulator knows that threads race")
    text, barrier = device.source(FILE), "    __syncthreads();\n"
    scans = text[text.index("T warps_before") : text.index("// ---- Bit strings")]
    assert scans.count(barrier) == 6
    parts = scans.split(barrier)
    fewer = barrier.join(parts[: number + 1]) + barrier.join(["", *parts[number + 1 :]])[len(barrier) :]
    assert fewer.count(barrier) == 5
    monkeypatch.setattr(device, "source", lambda _: text.replace(scans, fewer))
    monkeypatch.setattr(device, "_modules", {})
    monkeypatch.setattr(device, "_functions", {})
    indices = some_indices(90_000, 4000)
    section = gpu.put(bitmap.encode(indices, 90_000))
    with pytest.raises(gpu.module.EmulationError, match="race"):
        bitmap.decode(section, 90_000, indices.size)


@pytest.mark.parametrize("right, wrong", [
    ("lane_number() <= last ? word & SUM", "lane_number() == last ? word & SUM"),
    ("while (__any_sync(WHOLE_WARP, word < AGGREGATE))", "while (false)"),
])  # fmt: skip
def test_the_look_back_is_needed(gpu, right, wrong, monkeypatch):
    """Blocks that run at once wait for each other, and read sums that are not prefixes yet."""
    if not hasattr(gpu.module, "EmulationError"):
        pytest.skip("a wrong kernel may do anything on a GPU")
    text = device.source(FILE)
    assert right in text
    monkeypatch.setattr(device, "source", lambda _: text.replace(right, wrong))
    monkeypatch.setattr(device, "_modules", {})
    monkeypatch.setattr(device, "_functions", {})
    monkeypatch.setattr(gpu.module, "processors", 4)
    indices = some_indices(600_000, 40_000)
    with pytest.raises((AssertionError, ValueError, gpu.module.EmulationError)):
        section = gpu.put(bitmap.encode(indices, 600_000))
        same(gpu.host(bitmap.decode(section, 600_000, indices.size)), indices)
