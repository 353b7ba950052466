"""The containers of all ranks, decoded together by codecs that can: see conftest.py."""

import numpy as np
import pytest

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.config import Config
from hvd_deepreduce.ops import fused, sections
from hvd_deepreduce.pipeline import Pipeline, bundle
from hvd_deepreduce.wire import frame
from hvd_deepreduce.wire.standalone import ContainerError
from tests import cases, cuda_emulator
from tests.ops.conftest import ON_GPU

KEY = RngKey(3, 4, 5)
INDEX = {"rans": "rans", "rice": "rice", "bloom": {"name": "bloom", "policy": "p0"},
         "bloom_p1": {"name": "bloom", "policy": "p1"}}  # fmt: skip
JOINT = {"blocks": {}, "blocks of qsgd": {"value": "qsgd", "bits": 2}, "plain blocks": {"coded": False},
         "plain blocks of float16": {"coded": False, "value": "float16"}}  # fmt: skip
FUSED = {"rice and qsgd": "rice", "rice_blocks and qsgd": "rice_blocks"}
"""As the recommended preset, whose containers one call decodes and sums."""
SIGNS = "rice_blocks and signs"
"""As the presets for AdamW: so on a GPU only."""
TOGETHER = [*FUSED, SIGNS, "rans", "rice", "bloom", "blocks", "plain blocks"]
"""Codecs that decode the containers of all ranks in one set of launches."""


def made(index, density, **value):
    sparsifier = {"name": "topk", "density": density}
    if index in FUSED:
        value = {"name": "qsgd", "fit_scale": False, **value}
        return Pipeline(Config.load(sparsifier=sparsifier, index=FUSED[index], value=value))
    if index == SIGNS:
        value = {"name": "sign", **value}
        return Pipeline(Config.load(sparsifier=sparsifier, index="rice_blocks", value=value, error_feedback=False))
    if index in JOINT:
        return Pipeline(Config.load(sparsifier=sparsifier, joint={"name": "densestream", **JOINT[index]}))
    return Pipeline(Config.load(sparsifier=sparsifier, index=INDEX[index], value="raw"))


def gathered(pipeline, sizes, ranks, dtype=np.float32):
    """The messages of all ranks, and the slices."""
    slices = cases.slices(pipeline, sizes, KEY)
    sent = []
    for rank in range(ranks):
        parts = [one._replace(key=one.key._replace(rank=rank)) for one in slices]
        gradient = cases.random(sum(sizes), dtype, seed=rank)
        sent.append(bundle.encode(gradient, None, None, parts, ranks, True))
    return np.concatenate(sent), slices


def compare(gpu, data, ranks, slices, dtype=np.float32, scale=0.5):
    """The sums of the host and of a GPU."""
    want = np.full(slices[-1].part[1], 7, dtype)
    own = bundle.sum_into(want, data, ranks, slices, scale)
    there = gpu.put(np.full_like(want, 7))
    assert bundle.sum_into(there, gpu.bytes(data), ranks, slices, scale) == own
    assert gpu.host(there).tobytes() == want.tobytes()


@pytest.mark.parametrize("index", [*INDEX, *JOINT])
@pytest.mark.parametrize(("sizes", "density", "ranks"), [([3000], 0.05, 9), ([40, 5003], 0.1, 3), ([1], 1.0, 2)])
def test_sums_are_the_cpu_s(gpu, index, sizes, density, ranks):
    data, slices = gathered(made(index, density), sizes, ranks)
    compare(gpu, data, ranks, slices)


@pytest.mark.parametrize("sizes", [[1], [3000], [40, 700, 5003], [30_000]])
@pytest.mark.parametrize(
    ("density", "value"),
    [(0.05, {}), (0.001, {"bits": 2, "bucket_size": 1}), (0.9, {"bits": 8, "bucket_size": 100, "norm": "l2"})],
)
@pytest.mark.parametrize("index", FUSED)
def test_sums_of_the_recommended_codecs(gpu, index, sizes, density, value, monkeypatch):
    """By the one call, not by the composed way behind it."""
    found, decode = [], fused.decode
    monkeypatch.setattr(fused, "decode", lambda *given: found.append(decode(*given)) or found[-1])
    for ranks in (1, 3, 9):
        data, slices = gathered(made(index, density, **value), sizes, ranks)
        compare(gpu, data, ranks, slices)
    assert len(found) == 6 and None not in found


@pytest.mark.parametrize("value", [{}, {"bucket_size": 3}, {"bucket_size": 700}, {"magnitude": "one"}])
def test_sums_of_signs(gpu, value):
    for sizes, ranks in (([40, 700, 5003], 3), ([3000], 9)):
        data, slices = gathered(made(SIGNS, 0.3, **value), sizes, ranks)
        before = cuda_emulator.waits
        compare(gpu, data, ranks, slices)
        assert ON_GPU or cuda_emulator.waits - before == 2  # the one call, and the result's copy


@pytest.mark.parametrize("index", ["rice", "blocks", "plain blocks"])
def test_sums_of_float64(gpu, index):
    data, slices = gathered(made(index, 0.3), [1003, 7], 3, np.float64)
    compare(gpu, data, 3, slices, np.float64)


@pytest.mark.parametrize("index", JOINT)
def test_a_rank_with_nothing_to_send(gpu, index):
    """Its stream has no block. And one that has too few nonzero elements, and one whose gradient is not finite."""
    pipeline, nothing = made(index, 0.2), np.zeros(300, np.float32)
    few, broken = nothing.copy(), nothing.copy()
    few[7], broken[8] = 3, np.inf
    slices = cases.slices(pipeline, [300], KEY)
    for other in (nothing, few, broken):
        data = np.concatenate([pipeline.encode(one, None, KEY, 2) for one in (cases.random(300), other)])
        compare(gpu, data, 2, slices)


def test_parts_of_rans(gpu):
    data, slices = gathered(made("rans", 0.9), [75_000], 2)
    compare(gpu, data, 2, slices)


@pytest.mark.parametrize("index", [*TOGETHER, "blocks of qsgd"])
def test_a_changed_byte_is_refused_by_its_rank(gpu, index):
    fused_too = index in (*FUSED, SIGNS)
    sizes = [60, 90] if fused_too else [300]
    data, slices = gathered(made(index, 0.1), sizes, 3)
    size = data.size // 3
    places = [3, size + 4, size + 6, 2 * size + 12, 2 * size + size // 2]
    for at in range(0, data.size, 1 if ON_GPU else 7) if fused_too else places:
        broken, found = data.copy(), []
        broken[at] ^= 2
        for put, given in ((np.array, np.array), (gpu.put, gpu.bytes)):
            out = put(np.full(sum(sizes), 7, np.float32))
            with pytest.raises(ContainerError, match=r"rank \d cannot be read") as error:
                bundle.sum_into(out, given(broken), 3, slices, 1.0)
            assert (gpu.host(out) == 7).all()
            found.append(str(error.value))
        assert found[0] == found[1]
    for cut in (0, 4, data.size // 2, data.size - 1):
        with pytest.raises(ContainerError):
            bundle.sum_into(out, gpu.bytes(data[:cut]), 3, slices, 1.0)
    with pytest.raises(ContainerError, match="1 bytes follow"):
        bundle.sum_into(out, gpu.bytes(np.append(data, np.uint8(0))), 3, slices, 1.0)
    assert (gpu.host(out) == 7).all()


def test_a_filter_with_another_number_of_positives_is_refused(gpu):
    pipeline = made("bloom", 0.1)
    container = pipeline.encode(cases.random(300), None, KEY)
    assert container.size
    count = int(pipeline.encode(cases.random(300), None, KEY, 2)[5])
    data, slices = gathered(pipeline, [300], 1)
    assert data[5] == count  # the number of positives, a varint of one byte
    for ranks in (1, 2):
        wrong = data.copy()
        wrong[5] -= 1
        with pytest.raises(ContainerError):
            bundle.sum_into(gpu.put(np.zeros(300, np.float32)), gpu.bytes(np.tile(wrong, ranks)), ranks, slices, 1.0)


@pytest.mark.parametrize("joint", JOINT)
def test_broken_blocks_are_refused(gpu, joint):
    """With the right checksum: whatever the bytes are, the sum or the error is the CPU's, and nothing else is read."""
    pipeline, random, refused = made(joint, 0.1), np.random.default_rng(5), 0
    data, slices = gathered(pipeline, [500], 2)
    (expected,) = [pipeline.expected(500, np.dtype(np.float32), KEY)]
    salt = frame.salt(expected.shared.digest, 500, expected.dtype, KEY)
    size = pipeline.encode(cases.random(500), None, KEY, 2).size
    for attempt in range(60):
        second = data[size:].copy()
        for _ in range(1 + attempt % 3):
            place = 16 + random.integers(40) if attempt % 2 else random.integers(16, second.size)
            second[place] ^= 1 << random.integers(8)
        second[:4] = np.array([sections.checksum(second, 0) + salt & 0xFFFFFFFF], np.uint32).view(np.uint8)
        broken, found = np.concatenate([data[:size], second]), []
        for put in (np.array, gpu.put):
            out = put(np.full(500, 7, np.float32))
            try:
                bundle.sum_into(out, put(broken), 2, slices, 1.0)
            except ContainerError as error:
                assert (gpu.host(out) == 7).all() and "rank 1" in str(error)
                found.append(None)
            else:
                found.append(gpu.host(out).tobytes())
        assert found[0] == found[1]
        refused += found[0] is None
    assert 20 < refused < 60


@pytest.mark.parametrize("index", TOGETHER)
def test_launches_do_not_grow_with_the_ranks(gpu, index):
    if ON_GPU:
        pytest.skip("the emulator counts launches and waits")
    counts = []
    for ranks in (2, 8):
        data, slices = gathered(made(index, 0.05), [3000], ranks)
        there, out = gpu.bytes(data), gpu.put(np.zeros(3000, np.float32))
        before = cuda_emulator.launches, cuda_emulator.waits
        bundle.sum_into(out, there, ranks, slices, 1.0)
        counts.append((cuda_emulator.launches - before[0], cuda_emulator.waits - before[1]))
    assert counts[0] == counts[1] and counts[0][1] == (1 if index in (*FUSED, SIGNS) else 3)
    if index in FUSED:  # headers, the kernels, the sum's two
        assert counts[0][0] == {"rice": 3, "rice_blocks": 4}[FUSED[index]] + 3
