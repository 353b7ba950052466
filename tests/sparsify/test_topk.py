"""The sparsifier ``topk``, and its operation. test_oracles.py has what all sparsifiers must do."""

import numpy as np
import pytest

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.sparsify.topk import TopK, kept_of
from hvd_deepreduce.ops import select
from tests.oracle import topk as oracle
from tests.oracle.pipeline import accumulated
from tests.sparsify.test_oracles import same

KEY = RngKey(1, 2, 3)


def check(dense, gradient, k):
    expected = accumulated(dense, gradient)
    work = dense.copy()
    same((*select.topk(work, gradient, k), work), (*oracle.select(expected, k), expected))


def adversaries(n, dtype):
    rng = np.random.default_rng(n)
    normal = rng.standard_normal(n).astype(dtype)
    stretch = normal * dtype(1e-3)
    stretch[n // 3 : n // 3 + n // 50] = rng.standard_normal(n // 50).astype(dtype) * dtype(100)
    spikes = np.zeros(n, dtype)
    spikes[rng.choice(n, max(1, n // 1000), replace=False)] = 1
    at_end = np.zeros(n, dtype)
    at_end[-max(1, n // 200) :] = np.arange(max(1, n // 200)) + 1
    return {
        "normal": normal,
        "one stretch": stretch,
        "spikes": spikes,
        "at the end": at_end,
        "zeros": np.zeros(n, dtype),
        "equal": np.full(n, -3, dtype),
        "rounded": np.round(normal * 4).astype(dtype),
        "rising": np.arange(n).astype(dtype),
        "wide": (normal * 10.0 ** rng.uniform(-30, 30, n)).astype(dtype),
    }


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [4095, 4096, 4097, 8191, 30011])
def test_exact_around_the_sample(n, dtype):
    gradient = np.random.default_rng(1).standard_normal(n).astype(dtype)
    for dense in adversaries(n, dtype).values():
        for k in (0, 1, n // 100, n // 3, n - 1, n):
            check(dense, None, k)
            check(dense, gradient, k)


def cheat_the_sample(n, k):
    """Two tensors: only zeros at the sampled places and k large values elsewhere; and large values at the sampled
    places only."""
    samples = min(n // 8, 1 << 16)
    i = np.arange(samples, dtype=np.uint64)
    first, following = n * i // samples, n * (i + 1) // samples
    hashed = i.astype(np.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        hashed = (hashed ^ (hashed >> np.uint32(shift))) * np.uint32(factor)
    seen = np.zeros(n, bool)
    seen[first + hashed % (following - first)] = True
    hidden = np.zeros(n, np.float32)
    hidden[np.flatnonzero(~seen)[:k]] = 5
    shown = np.full(n, 1e-3, np.float32)
    shown[seen] = 7
    return hidden, shown


def test_exact_with_a_misleading_sample():
    n = 65536
    for dense in cheat_the_sample(n, n // 100):
        for k in (1, n // 100, n // 100 + 1, n // 8, n // 8 + 1, n // 2):
            check(dense, None, k)
            check(dense, np.zeros(n, np.float32), k)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(np.float32, "normal"), (np.float32, "one stretch"), (np.float32, "rounded"), (np.float64, "at the end")],
)
def test_result_does_not_depend_on_the_threads(dtype, name):
    n = (1 << 20) * 2 + 4099
    dense, gradient = adversaries(n, dtype)[name], np.random.default_rng(3).standard_normal(n).astype(dtype)
    total = dense + gradient
    indices, values = oracle.select(total, n // 100)
    for threads in (1, 2, 3):
        work = dense.copy()
        for source in (gradient, None):  # with accumulation, and then from the accumulated vector
            same((*select.topk(work, source, n // 100, threads), work), (indices, values, total))


def test_exact_if_the_caller_flushes_denormals():
    """The thread of a caller may flush denormals to zero (torch.set_flush_denormal, or -ffast-math in a library)."""
    torch = pytest.importorskip("torch")
    dense = np.zeros(64, np.float32)
    dense.view(np.uint32)[::20] = 5
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        indices, _ = select.topk(dense, None, 40)
    finally:
        torch.set_flush_denormal(False)
    np.testing.assert_array_equal(indices, oracle.select(dense, 40)[0])


@pytest.mark.parametrize(
    ("density", "numel", "kept"),
    [(0.01, 0, 0), (0.01, 1, 1), (0.01, 99, 1), (0.01, 100, 1), (0.01, 199, 1), (0.29, 100, 29), (1.0, 7, 7),
     (1e-9, 50, 1), (0.1, 30, 3), (0.01, 25_600_000, 256_000), (0.999, 1000, 999)],
)  # fmt: skip
def test_how_many_are_kept(density, numel, kept):
    assert kept_of(density, numel) == kept


def test_what_a_density_is_a_share_of():
    """A gradient of which 100 of 100,000 elements are not zero."""
    dense = np.zeros(100_000, np.float32)
    dense[500:600] = np.arange(1, 101)
    for density, kept in ((0.01, 1), (0.1, 10), (0.5, 50), (1.0, 100)):
        indices, _ = TopK(density=density, density_of="nonzeros").select(dense.copy(), None, KEY, 2)
        assert indices.tolist() == list(range(600 - kept, 600))
        indices, _ = TopK(density=density).select(dense.copy(), None, KEY, 2)
        assert indices.tolist() == list(range(500, 600))
    zeros = np.zeros(9, np.float32)
    assert all(TopK(density_of=of).select(zeros, None, KEY, 1)[0].size == 0 for of in ("elements", "nonzeros"))
