"""Sorts give the same bytes on the host and on a GPU."""

import numpy as np
import pytest

from hvd_deepreduce.ops import sort
from tests.ops.compare import VALUES, both


@pytest.mark.parametrize("name", VALUES)
def test_by_value(gpu, name):
    both(gpu, sort.by_value, VALUES[name])


@pytest.mark.parametrize("numel", [0, 1, 33, 5003])
def test_by_index(gpu, numel):
    order = np.random.default_rng(3).permutation(numel).astype(np.uint32)
    both(gpu, sort.by_index, order + np.uint32(7))
    if numel:
        order[0] = order[-1]
        both(gpu, sort.by_index, order)


def test_by_index_with_many_equal_indices(gpu):
    both(gpu, sort.by_index, np.random.default_rng(3).integers(0, 50, 3000).astype(np.uint32))
