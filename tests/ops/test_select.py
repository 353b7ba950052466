"""Top-k and threshold give the same bytes on the host and on a GPU."""

import numpy as np
import pytest

from hvd_deepreduce.ops import select
from tests import cases
from tests.ops.compare import INPUTS, both, same


@pytest.mark.parametrize("name", INPUTS)
def test_topk(gpu, name):
    x = INPUTS[name]
    y = np.random.default_rng(5).permutation(x) * x.dtype.type(0.5)
    for k in {0, min(1, x.size), x.size // 10, x.size}:
        both(gpu, select.topk, x, None, k)
        both(gpu, select.topk, x, y, k)


def test_topk_where_the_sample_misleads(gpu):
    """All large elements are where the sample does not look; and there are more ties than candidates have room."""
    x = np.zeros(300_000, np.float32)
    x[:40] = 3.0
    both(gpu, select.topk, x, None, 60)
    x[:] = -0.5
    both(gpu, select.topk, x, x, 1000)


def test_topk_of_fewer_nonzeros(gpu):
    """Exact counts, wherever the elements are that are not zero; denormals are not zeros."""
    for dtype in (np.float32, np.float64):
        for numel, count in ((1, 0), (1, 1), (700, 3), (30_000, 40), (30_000, 300), (30_000, 301)):
            x = np.zeros(numel, dtype)
            x[np.random.default_rng(count).choice(numel, count, replace=False)] = 1
            x[::2] *= np.finfo(dtype).smallest_subnormal
            indices, _ = both(gpu, select.topk, x, None, numel // 100 or numel)
            assert indices.size == min(count, numel // 100 or numel)
            assert both(gpu, select.topk, x, -x, numel)[0].size == 0  # they are zeros after the accumulation


def test_topk_of_unaligned_views(gpu):
    x = cases.random(5000)
    want = select.topk(x[3:].copy(), None, 77)
    same(gpu.host(select.topk(gpu.put(x)[3:], None, 77)), want)


@pytest.mark.parametrize("name", INPUTS)
def test_threshold_and_nonzero(gpu, name):
    x = INPUTS[name]
    for least in (0.0, 0.5, 1e-40, 1e300):
        both(gpu, select.threshold, x, None, least)
        both(gpu, select.threshold, x, np.ascontiguousarray(-x[::-1]), least)


def test_threshold_keeps_more_than_there_is_room_for(gpu):
    both(gpu, select.threshold, cases.random(140_000), cases.random(140_000, seed=2), 0.01)


@pytest.mark.parametrize("name", INPUTS)
def test_topk_of_chunks(gpu, name):
    x = INPUTS[name]
    y = np.random.default_rng(5).permutation(x) * x.dtype.type(0.5)
    for chunk in (chunk for chunk in (3, 64, 1500) if x.size <= 10 * chunk):  # the emulator takes long for a chunk
        last = x.size % chunk or min(chunk, x.size)
        for k, of_last in ((1, 1), (-(-chunk // 3), -(-last // 3)), (chunk, last)):
            both(gpu, select.topk_of_chunks, x, None, chunk, k, of_last)
            both(gpu, select.topk_of_chunks, x, y, chunk, k, of_last)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_topk_of_long_chunks(gpu, dtype):
    """Of which a block holds all in registers, or reads parts again; with many ties."""
    x = cases.random(13_001, dtype)
    tied = np.random.default_rng(6).choice(x[:40], x.size)
    for chunk, k, last in ((4096, 300, 20), (2048, 1, 1), (4097, 4097, 710), (10_000, 100, 3000), (20_000, 1300, 1300)):
        both(gpu, select.topk_of_chunks, x, tied, chunk, k, last)
        both(gpu, select.topk_of_chunks, tied, None, chunk, k, last)
