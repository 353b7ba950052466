"""The sparsifier ``block_topk``."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from pydantic import ValidationError

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.sparsify.block_topk import BlockTopK
from hvd_deepreduce.ops import blocks
from tests import cases
from tests.oracle import block_topk as oracle
from tests.oracle.pipeline import accumulated

KEY = RngKey(1, 2, 3)
# Few distinct values, so that many norms are equal.
TIED = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e-45, 3.4e38, -3.4e38])


def check(dense, gradient, codec, threads=1):
    expected = accumulated(dense, gradient)
    work = dense.copy()
    indices, values = codec.select(work, gradient, KEY, threads)
    wanted = oracle.select(expected, codec.density, codec.block, codec.norm == "l2")
    for found, right in zip((indices, values, work), (*wanted, expected), strict=True):
        assert found.dtype == right.dtype
        np.testing.assert_array_equal(found.view(np.uint8), right.view(np.uint8))


@given(
    st.data(), st.sampled_from([np.float32, np.float64]), st.booleans(), st.integers(1, 40), st.floats(0.01, 1),
    st.sampled_from(["l2", "l1"]),
)  # fmt: skip
def test_equals_the_oracle_with_ties(data, dtype, accumulate, block, density, norm):
    dense = data.draw(arrays(dtype, st.integers(0, 150), elements=TIED.map(dtype)))
    gradient = None
    if accumulate:
        gradient = data.draw(arrays(dtype, dense.size, elements=st.sampled_from([0.0, 1.0, -0.5]).map(dtype)))
    check(dense, gradient, BlockTopK(density=density, block=block, norm=norm))


@pytest.mark.parametrize("norm", ["l2", "l1"])
@pytest.mark.parametrize("name", cases.inputs())
def test_awkward_tensors(name, norm):
    dense = cases.inputs()[name]
    for block in (1, 7, 64, 2**31):
        for density in (0.01, 0.3, 1.0):
            codec = BlockTopK(density=density, block=block, norm=norm)
            check(dense, None, codec)
            check(dense, dense, codec)


@pytest.mark.parametrize("norm", ["l2", "l1"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("block", [1, 3, 8, 9, 16, 61, 256])
def test_norms_equal_the_oracle_to_the_bit(norm, dtype, block):
    dense, gradient = cases.random(4099, dtype) * dtype(1e3), cases.random(4099, dtype, 1)
    found = blocks.norms(dense.copy(), gradient, block, norm == "l2")
    assert found.tolist() == oracle.norms(dense + gradient, block, norm == "l2")


def test_selects_the_blocks_of_largest_norm():
    dense = np.zeros(1000, np.float32)
    dense[70], dense[320:384], dense[990:] = 5, 1, 3
    for norm, best in (("l2", [5, 15]), ("l1", [5, 15]), ("l2", [1, 5, 15])):
        codec = BlockTopK(density=len(best) / 16, norm=norm)
        indices, values = codec.select(dense, None, KEY, 1)
        assert indices.tolist() == [i for b in best for i in range(64 * b, min(64 * b + 64, 1000))]
        np.testing.assert_array_equal(values, dense[indices])
    # Blocks 15, 5 and 1 have sums of squares 10 * 9 > 64 * 1 > 25, and sums of magnitudes 10 * 3 < 64 * 1 > 5.
    assert BlockTopK(density=1 / 16).select(dense, None, KEY, 1)[0][0] == 15 * 64
    assert BlockTopK(density=1 / 16, norm="l1").select(dense, None, KEY, 1)[0][0] == 5 * 64


def test_random_selections_of_blocks_keep_less_energy():
    dense = cases.random(64 * 200 + 5)
    indices, values = BlockTopK(density=0.1).select(dense, None, KEY, 1)
    kept = float((values.astype(np.float64) ** 2).sum())
    rng = np.random.default_rng(0)
    for _ in range(50):
        blocks = rng.choice(200, 20, replace=False)
        other = dense[: 64 * 200].reshape(200, 64)[blocks].astype(np.float64)
        assert (other**2).sum() < kept
    assert indices.size == 20 * 64


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("block", [64, 1 << 19])
def test_result_does_not_depend_on_the_threads(threads, block):
    dense, gradient = cases.random((1 << 21) + 77), cases.random((1 << 21) + 77, seed=1)
    codec = BlockTopK(density=0.3, block=block)
    one, more = dense.copy(), dense.copy()
    for a, b in zip(codec.select(one, gradient, KEY, 1), codec.select(more, gradient, KEY, threads), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(one, more)


@pytest.mark.parametrize("settings", [{"density": 0}, {"density": 2}, {"block": 0}, {"block": 2**32}, {"norm": "max"}])
def test_settings_out_of_range(settings):
    with pytest.raises(ValidationError):
        BlockTopK(**settings)
