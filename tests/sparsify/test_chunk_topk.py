"""The sparsifier ``chunk_topk``."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from pydantic import ValidationError

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.sparsify.chunk_topk import ChunkTopK
from hvd_deepreduce.config import Config
from hvd_deepreduce.pipeline import Pipeline
from tests import cases
from tests.oracle import chunk_topk as oracle
from tests.oracle.pipeline import accumulated

KEY = RngKey(1, 2, 3)
# Few distinct values, so that most magnitudes are equal, and many are zeros of both signs.
TIED = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 1e-45, -1e-45, 3.4e38])


def check(dense, gradient, codec, threads=1):
    expected = accumulated(dense, gradient)
    work = dense.copy()
    indices, values = codec.select(work, gradient, KEY, threads)
    wanted = oracle.select(expected, codec.density, codec.chunk)
    for found, right in zip((indices, values, work), (*wanted, expected), strict=True):
        assert found.dtype == right.dtype
        np.testing.assert_array_equal(found.view(np.uint8), right.view(np.uint8))


@given(st.data(), st.sampled_from([np.float32, np.float64]), st.booleans(), st.integers(1, 50), st.floats(0.01, 1))
def test_equals_the_oracle_with_ties(data, dtype, accumulate, chunk, density):
    dense = data.draw(arrays(dtype, st.integers(0, 150), elements=TIED.map(dtype)))
    gradient = None
    if accumulate:
        gradient = data.draw(arrays(dtype, dense.size, elements=st.sampled_from([0.0, 1.0, -0.5]).map(dtype)))
    check(dense, gradient, ChunkTopK(density=density, chunk=chunk))


@given(st.data(), st.sampled_from([32, 64]), st.integers(1, 70), st.floats(0.01, 1))
def test_equals_the_oracle_on_any_finite_floats(data, width, chunk, density):
    limit = float(np.finfo(f"float{width}").max) / 4
    dense = data.draw(arrays(f"float{width}", st.integers(0, 200), elements=st.floats(-limit, limit, width=width)))
    check(dense, None, ChunkTopK(density=density, chunk=chunk))


@pytest.mark.parametrize("name", cases.inputs())
def test_awkward_tensors(name):
    dense = cases.inputs()[name]
    for chunk in (1, 7, 64, 65536):
        for density in (0.01, 0.3, 1.0):
            codec = ChunkTopK(density=density, chunk=chunk)
            check(dense, None, codec)
            check(dense, dense, codec)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("chunk", [100, 4096])
def test_chunks_of_very_different_scales(dtype, chunk):
    """The magnitude to begin with comes from the chunk before, which says nothing here."""
    rng = np.random.default_rng(chunk)
    sizes = 10.0 ** rng.uniform(-30, 30, 9)
    dense = np.concatenate([rng.standard_normal(chunk) * size for size in [*sizes, 0.0, 1e-40, 1.0]]).astype(dtype)
    dense = np.append(dense, dtype(2))
    for density in (0.015625, 0.5, 1.0):
        check(dense, None, ChunkTopK(density=density, chunk=chunk))
        check(dense, dense[::-1].copy(), ChunkTopK(density=density, chunk=chunk))


def test_the_defaults_keep_64_of_4096_and_a_share_of_the_last_chunk():
    dense = cases.random(3 * 4096 + 130)
    indices, _ = ChunkTopK().select(dense, None, KEY, 1)
    assert np.bincount(indices // 4096).tolist() == [64, 64, 64, 2]
    assert ChunkTopK().select(dense[: 4096 + 3], None, KEY, 1)[0].size == 65


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("chunk", [61, 4096])
def test_result_does_not_depend_on_the_threads(threads, chunk):
    """With zeros at places, so that the threads' parts leave room behind them."""
    dense, gradient = cases.random((1 << 21) + 77), cases.random((1 << 21) + 77, seed=1)
    dense[1000:90_000] = gradient[1000:90_000] = 0
    codec = ChunkTopK(chunk=chunk)
    one, more = dense.copy(), dense.copy()
    for a, b in zip(codec.select(one, gradient, KEY, 1), codec.select(more, gradient, KEY, threads), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(one, more)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_leaves_the_residual_as_it_is(bad):
    gradient, residual = cases.random(9000), cases.random(9000, seed=1)
    gradient[5000], before = bad, residual.copy()
    container = Pipeline(Config.load(sparsifier="chunk_topk")).encode(gradient, residual, KEY)
    np.testing.assert_array_equal(residual, before)
    assert container.size > gradient.nbytes  # sent uncompressed, so that all ranks see it


@pytest.mark.parametrize("settings", [{"density": 0}, {"density": 2}, {"chunk": 0}, {"chunk": 65537}])
def test_settings_out_of_range(settings):
    with pytest.raises(ValidationError):
        ChunkTopK(**settings)
