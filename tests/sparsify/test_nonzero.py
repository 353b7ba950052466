"""The sparsifiers ``nonzero`` and ``none``."""

import numpy as np
import pytest

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.sparsify.none import All
from hvd_deepreduce.codecs.sparsify.nonzero import NonZero
from tests import cases

KEY = RngKey(1, 2, 3)


@pytest.mark.parametrize("name", cases.inputs())
def test_selects_the_nonzero_elements(name):
    dense = cases.inputs()[name]
    indices, values = NonZero().select(dense.copy(), None, KEY, 1)
    np.testing.assert_array_equal(indices, np.flatnonzero(dense != 0))
    np.testing.assert_array_equal(values, dense[dense != 0])


def test_accumulates_before_it_selects():
    dense, gradient = np.array([1, 0, 2, -0.0], np.float64), np.array([-1, 3, 0, 0], np.float64)
    indices, values = NonZero().select(dense, gradient, KEY, 1)
    assert indices.tolist() == [1, 2] and values.tolist() == [3, 2] and dense.tolist() == [0, 3, 2, 0]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_none_sends_all_elements_in_order(threads):
    dense, gradient = cases.random((1 << 20) + 5), cases.random((1 << 20) + 5, seed=1)
    total = dense + gradient
    indices, values = All().select(dense, gradient, KEY, threads)
    assert indices is None and not np.shares_memory(values, dense)
    np.testing.assert_array_equal(values, total)
    np.testing.assert_array_equal(dense, total)
