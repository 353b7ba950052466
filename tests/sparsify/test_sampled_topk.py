"""The sparsifier ``sampled_topk``."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.sparsify.sampled_topk import SampledTopK
from hvd_deepreduce.codecs.sparsify.topk import TopK
from tests import cases
from tests.oracle import sampled_topk as oracle
from tests.oracle.pipeline import accumulated

KEY = RngKey(1, 2, 3)


def check(dense, gradient, codec, key=KEY, threads=1):
    expected = accumulated(dense, gradient)
    work = dense.copy()
    indices, values = codec.select(work, gradient, key, threads)
    wanted = oracle.select(expected, codec.density, codec.sample, codec.excess, key[:3])
    for found, right in zip((indices, values, work), (*wanted, expected), strict=True):
        assert found.dtype == right.dtype
        np.testing.assert_array_equal(found.view(np.uint8), right.view(np.uint8))
    return indices


@given(
    st.integers(0, 1200), st.floats(0.01, 1), st.floats(0.001, 1), st.floats(1, 3), st.booleans(),
    st.sampled_from([np.float32, np.float64]), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_equals_the_oracle(numel, density, sample, excess, accumulate, dtype, step):
    codec = SampledTopK(density=density, sample=sample, excess=excess)
    gradient = cases.random(numel, dtype, 1) if accumulate else None
    check(np.round(cases.random(numel, dtype), 1), gradient, codec, RngKey(5, 6, step))


@pytest.mark.parametrize("name", cases.inputs())
def test_awkward_tensors(name):
    dense = cases.inputs()[name]
    for codec in (SampledTopK(), SampledTopK(density=0.5, excess=1), SampledTopK(density=1.0)):
        check(dense, None, codec)
        check(dense, dense, codec)


def test_number_of_elements_is_close_to_the_density():
    """With 64 sampled elements above the threshold, the relative spread is 1/8. ``excess`` bounds the number."""
    numel, wanted = 200_000, 2000
    dense = cases.random(numel)
    sizes = [SampledTopK().select(dense, None, RngKey(0, 1, step), 1)[0].size for step in range(60)]
    assert np.mean(sizes) == pytest.approx(wanted, rel=0.06) and np.std(sizes) < wanted / 6
    assert max(sizes) <= 1.3 * wanted and len(set(sizes)) > 50
    larger = [SampledTopK(sample=0.1).select(dense, None, RngKey(0, 1, step), 1)[0].size for step in range(20)]
    assert np.std(larger) < wanted / 12


def test_kept_elements_are_the_largest():
    dense = cases.random(100_003)
    indices = check(dense, None, SampledTopK(density=0.02))
    best = TopK(density=0.04).select(dense, None, KEY, 1)[0]
    assert np.abs(dense[indices]).min() > np.abs(np.delete(dense, indices)).max() and np.isin(indices, best).all()


def test_excess_is_reduced_by_exact_topk():
    """If too many elements are selected, exact top-k reduces them to the wanted number; ties go to the lower index."""
    dense = np.zeros(50_000, np.float32)
    dense[:3000] = np.arange(1, 3001)
    strict, loose = ({}, {})
    for step in range(12):
        for excess, sizes in ((1, strict), (1.3, loose)):
            indices = SampledTopK(density=0.02, excess=excess).select(dense.copy(), None, RngKey(0, 0, step), 1)[0]
            sizes[step] = indices.size
            assert indices.tolist() == list(range(3000 - indices.size, 3000))
    assert max(strict.values()) == 1000 < max(loose.values()) <= 1300
    assert all(strict[step] == min(loose[step], 1000) for step in strict)
    assert check(np.ones(50_000, np.float32), None, SampledTopK(density=0.02)).tolist() == list(range(1000))


def test_zeros_are_never_sent():
    dense = np.zeros(50_000, np.float32)
    dense[::20] = 1e-45
    assert check(dense, None, SampledTopK(density=0.2, sample=0.01)).tolist() == list(range(0, 50_000, 20))


@pytest.mark.parametrize("threads", [2, 3])
def test_result_does_not_depend_on_the_threads(threads):
    dense, gradient = cases.random((1 << 21) + 77), cases.random((1 << 21) + 77, seed=1)
    one = SampledTopK().select(dense.copy(), gradient, KEY, 1)
    more = SampledTopK().select(dense.copy(), gradient, KEY, threads)
    np.testing.assert_array_equal(one[0], more[0])
    np.testing.assert_array_equal(one[1], more[1])


@pytest.mark.parametrize(
    "settings", [{"density": 0}, {"density": 1.1}, {"sample": 0}, {"sample": 2}, {"excess": 0.9},
                 {"excess": float("inf")}],
)  # fmt: skip
def test_settings_out_of_range(settings):
    with pytest.raises(ValidationError):
        SampledTopK(**settings)
