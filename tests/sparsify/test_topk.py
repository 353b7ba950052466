"""The sparsifier ``topk``."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.sparsify.topk import TopK, kept_of
from hvd_deepreduce.ops import select
from tests.oracle import topk as oracle
from tests.oracle.pipeline import accumulated

KEY = RngKey(1, 2, 3)
# Few distinct values, so that most magnitudes are equal, and many are zeros of both signs.
TIED = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 1e-45, -1e-45, 3.4e38])


def check(dense, gradient, k, threads=1):
    dtype = dense.dtype
    expected_dense = accumulated(dense, gradient)
    indices, values = oracle.select(expected_dense, k)
    work = dense.copy()
    found, kept = select.topk(work, gradient, k, threads)
    assert found.dtype == np.uint32 and kept.dtype == dtype
    np.testing.assert_array_equal(found, indices)
    np.testing.assert_array_equal(kept.view(np.uint8), values.view(np.uint8))
    np.testing.assert_array_equal(work.view(np.uint8), expected_dense.view(np.uint8))


@given(st.data(), st.sampled_from([np.float32, np.float64]), st.booleans())
def test_exact_with_ties(data, dtype, accumulate):
    n = data.draw(st.integers(1, 80))
    dense = data.draw(st_numpy.arrays(dtype, n, elements=TIED.map(dtype)))
    gradient = None
    if accumulate:
        gradient = data.draw(st_numpy.arrays(dtype, n, elements=st.sampled_from([0.0, 1.0, -1.0, 0.5]).map(dtype)))
    check(dense, gradient, data.draw(st.integers(0, n)))


@given(st.data(), st.sampled_from([32, 64]))
def test_exact_on_any_finite_floats(data, width):
    limit = float(np.finfo(f"float{width}").max) / 4
    floats = st.floats(-limit, limit, width=width)
    n = data.draw(st.integers(1, 200))
    dense = data.draw(st_numpy.arrays(f"float{width}", n, elements=floats))
    check(dense, None, data.draw(st.integers(0, n)))


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
        for k in (1, n // 100, n // 3, n - 1, n):
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
            found, kept = select.topk(work, source, n // 100, threads)
            np.testing.assert_array_equal(found, indices)
            np.testing.assert_array_equal(kept, values)
            np.testing.assert_array_equal(work, total)


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


def test_select_of_an_empty_and_of_a_whole_tensor():
    empty = np.empty(0, np.float32)
    indices, values = TopK(density=0.5).select(empty, empty, KEY, 2)
    assert indices.size == values.size == 0
    dense = np.array([0, -1, 0, 2], np.float32)
    indices, values = TopK(density=1.0).select(dense, None, KEY, 2)
    assert indices.tolist() == [1, 3] and values.tolist() == [-1, 2]


@given(
    st.lists(st.one_of(st.just(0.0), TIED, st.floats(-(2.0**99), 2.0**99, width=32)), max_size=150), st.booleans(),
    st.floats(0, 1, exclude_min=True), st.sampled_from([np.float32, np.float64]),
)  # fmt: skip
def test_a_density_of_the_nonzeros(values, accumulate, density, dtype):
    dense = np.array(values, dtype)
    gradient = np.where(np.arange(dense.size) % 3, -dense, dtype(0)).astype(dtype) if accumulate else None
    expected = accumulated(dense, gradient)
    indices, kept = oracle.select_of_nonzeros(expected, density)
    found, sent = TopK(density=density, density_of="nonzeros").select(dense, gradient, KEY, 1)
    assert found.dtype == np.uint32 and sent.dtype == dtype
    np.testing.assert_array_equal(found, indices)
    np.testing.assert_array_equal(sent.view(np.uint8), kept.view(np.uint8))
    np.testing.assert_array_equal(dense.view(np.uint8), expected.view(np.uint8))


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


DIGEST = """
import hashlib
import numpy as np
from hvd_deepreduce.ops import library, select
rng = np.random.default_rng(5)
digest = hashlib.sha256()
for n in (1, 15, 16, 17, 4100, 70001):
    for scale in (1, 3):
        dense = np.round(rng.standard_normal(n) * 50, 0 if scale == 3 else 6).astype(np.float32)
        gradient = rng.standard_normal(n).astype(np.float32)
        for k in (1, -(-n // 100), n):
            work = dense.copy()
            for array in (*select.topk(work, gradient, k), work, *select.threshold(work, gradient, 40.0), work):
                digest.update(array.tobytes())
print(library.vector_level(), digest.hexdigest())
"""


def test_all_vector_levels_give_the_same_bytes():
    found = {}
    for wanted in ("portable", "avx2", ""):
        environment = {**os.environ, "HVD_DEEPREDUCE_VECTOR": wanted}
        environment.setdefault("PYTHONPATH", str(Path(__file__).parents[2]))
        level, digest = subprocess.run(
            [sys.executable, "-c", DIGEST], env=environment, capture_output=True, text=True, check=True
        ).stdout.split()
        found[wanted] = int(level), digest
    assert found["portable"][0] == 0 and found["avx2"][0] <= 1
    assert len({digest for _, digest in found.values()}) == 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("level", ["portable", "avx2", "avx512"])
def test_accumulation_saturates_at_the_largest_number(dtype, level):
    """Each level needs its own process, because a process reads HVD_DEEPREDUCE_VECTOR once."""
    program = f"""
import numpy as np
from hvd_deepreduce.ops import arrays, blocks, select
from tests.oracle.pipeline import accumulated
limit = np.finfo(np.{np.dtype(dtype).name}).max
gradient = np.random.default_rng(0).choice([limit, -limit, 1, 0], 5003).astype(np.{np.dtype(dtype).name})
for operation in (lambda x: select.topk(x, gradient, 50), lambda x: select.threshold(x, gradient, 2.0),
                  lambda x: arrays.add(x, gradient), lambda x: blocks.norms(x, gradient, 64, True)):
    x = gradient.copy()
    operation(x)
    assert x.tobytes() == accumulated(gradient, gradient).tobytes()
"""
    environment = {**os.environ, "HVD_DEEPREDUCE_VECTOR": level}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, timeout=60)
