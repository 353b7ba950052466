"""Sums that are written on a GPU, in the emulator: those of the host, bit for bit, with the same hashes."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_deepreduce.codecs.joint.stream import Stream
from hvd_deepreduce.codecs.sparse_tensor import SparseTensor
from hvd_deepreduce.exchange.mpi.sum_buffer import SumBuffer
from tests import cuda_emulator

pytestmark = [
    pytest.mark.emulator, pytest.mark.skipif(bool(cuda_emulator.available()), reason=cuda_emulator.available())
]


def streams(begin: int, end: int, count: int, dtype: type, rng: np.random.Generator) -> list[Stream]:
    """Of a region; some are empty, and some values are -0.0, 0.0, infinite or NaN."""
    made = []
    for number in range(count):
        kept = np.flatnonzero(rng.random(end - begin) < (0.0, 0.2, 0.9)[(number + begin) % 3]).astype(np.uint32)
        values = rng.choice([*rng.standard_normal(20), -0.0, 0.0, np.inf, np.nan], kept.size).astype(dtype)
        made.append(Stream.from_sparse(SparseTensor(5003, kept + np.uint32(begin), values), 2))
    return made


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize(("counts"), [[1], [3, 1, 2, 1, 1], [0, 2]])
def test_regions_on_a_gpu(counts: list[int], scale: float, dtype: type) -> None:
    rng = np.random.default_rng(len(counts))
    cuts = [0, *sorted(rng.integers(0, 5003, len(counts) - 1).tolist()), 5003]
    if len(counts) > 2:
        cuts[2] = cuts[1]  # a region of no elements
    regions = [
        (streams(i, j, count, dtype, rng), i, j) for count, i, j in zip(counts, cuts[:-1], cuts[1:], strict=True)
    ]
    here, there = np.full(5003, 7, dtype), cuda_emulator.asarray(np.full(5003, 7, dtype))
    sums = [SumBuffer(5003, np.dtype(dtype), True, out, scale) for out in (here, there)]
    launches = []
    for one, order in zip(sums, (regions, regions[::-1]), strict=True):  # regions come in any order
        for region in order:
            one.write_region(*region, 2)
        before = cuda_emulator.launches
        assert one.result() is one.out
        launches.append(cuda_emulator.launches - before)
    assert there.get().tobytes() == here.tobytes() and not np.array_equal(here, np.full(5003, 7))
    assert sums[0].hashes == sums[1].hashes and len(sums[0].hashes) == len({i for _, i, j in regions if i < j})
    assert launches[0] == 0 and launches[1] <= 2 * max(counts) + 2, "of each stream, not of each region"


def test_a_gpu_gets_the_sum_s_blocks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = SparseTensor(100_000, np.arange(0, 100_000, 100, dtype=np.uint32), np.ones(1000, np.float32))
    out, copied = cuda_emulator.zeros(100_000, np.float32), []
    asarray = cuda_emulator.asarray
    monkeypatch.setattr(cuda_emulator, "asarray", lambda array: copied.append(array.nbytes) or asarray(array))
    total = SumBuffer(100_000, np.dtype(np.float32), True, out)
    total.write_region([Stream.from_sparse(tensor, 0)], 0, 100_000)
    waits = cuda_emulator.waits
    total.result()
    assert len(copied) == 2 and sum(copied) < 12 * 1000 + 64 and cuda_emulator.waits - waits == 1
