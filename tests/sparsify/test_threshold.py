"""The sparsifier ``threshold``."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from pydantic import ValidationError

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.sparsify.threshold import Threshold
from hvd_deepreduce.ops import select
from tests.oracle import threshold as oracle
from tests.oracle.pipeline import accumulated

KEY = RngKey(1, 2, 3)


def check(dense, gradient, least, threads=1):
    total = accumulated(dense, gradient)
    indices, values = oracle.select(total, least)
    work = dense.copy()
    found, kept = select.threshold(work, gradient, least, threads)
    np.testing.assert_array_equal(found, indices)
    np.testing.assert_array_equal(kept.view(np.uint8), values.view(np.uint8))
    np.testing.assert_array_equal(work.view(np.uint8), total.view(np.uint8))


@given(st.data(), st.sampled_from([32, 64]), st.booleans())
def test_equals_the_oracle(data, width, accumulate):
    limit = float(np.finfo(f"float{width}").max) / 4
    floats = st.one_of(st.floats(-limit, limit, width=width), st.sampled_from([0.0, -0.0, 1.0, -1.0]))
    n = data.draw(st.integers(0, 60))
    dense = data.draw(arrays(f"float{width}", n, elements=floats))
    gradient = data.draw(arrays(f"float{width}", n, elements=floats)) if accumulate else None
    # Among the thresholds: one between two float32 numbers, one above the largest, and one below the denormals.
    least = data.draw(st.one_of(st.floats(0, 4, width=64), st.sampled_from([0.0, 1.0, 0.1, 1e300, 1e-320, 5e-324])))
    check(dense, gradient, least)


@pytest.mark.parametrize("least", [0.1, float(np.float32(0.1)), np.nextafter(0.1, 1), 1e-50, 1e39])
def test_threshold_is_not_rounded_to_float32(least):
    dense = np.array([0.1, np.nextafter(np.float32(0.1), np.float32(1)), 1e-45, 3.4e38, 0, -0.0], np.float32)
    check(np.concatenate([dense, -dense]), None, least)


def test_result_does_not_depend_on_the_threads():
    dense = np.random.default_rng(0).standard_normal((1 << 20) * 2 + 77).astype(np.float32)
    one = select.threshold(dense, None, 2.5, 1)
    np.testing.assert_array_equal(one[0], np.flatnonzero(np.abs(dense) >= 2.5))
    for threads in (2, 3):
        for a, b in zip(one, select.threshold(dense, None, 2.5, threads), strict=True):
            np.testing.assert_array_equal(a, b)


def test_select_accumulates_and_may_keep_nothing():
    dense = np.array([1, -0.5, 0.25], np.float32)
    indices, values = Threshold(threshold=0.5).select(dense, np.array([0, 0, -2], np.float32), KEY, 1)
    assert indices.tolist() == [0, 1, 2] and values.tolist() == [1, -0.5, -1.75]
    indices, values = Threshold(threshold=100).select(dense, None, KEY, 1)
    assert indices.size == values.size == 0
    assert dense.tolist() == [1, -0.5, -1.75]


@pytest.mark.parametrize("bad", [-1, float("nan"), float("inf"), "much", None])
def test_settings_out_of_range(bad):
    with pytest.raises(ValidationError):
        Threshold(threshold=bad)
