"""Random indices are the same on the host and on a GPU."""

import numpy as np
import pytest

from hvd_deepreduce.ops import random
from tests.ops.compare import KEY, both, same


@pytest.mark.parametrize("numel, count", [(1, 1), (2, 1), (307, 0), (307, 30), (307, 307), (100_003, 999)])
def test_random_indices(gpu, numel, count):
    want = random.indices(numel, count, *KEY, None)
    same(gpu.host(random.indices(numel, count, *KEY, gpu.put(np.zeros(1)))), want)


@pytest.mark.parametrize("first, count", [(0, 40), (60, 40), (99, 1), (100, 0), (10, 90)])
def test_the_last_images_are_what_the_first_ones_leave(gpu, first, count):
    like = np.empty(0, np.uint8)
    ours = both(gpu, random.indices, 100, count, *KEY, like, first)
    before = random.indices(100, first, *KEY, like)
    after = random.indices(100, 100 - first - count, *KEY, like, first + count)
    assert sorted([*before, *ours, *after]) == list(range(100))
