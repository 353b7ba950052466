"""Random indices are the same on the host and on a GPU."""

import numpy as np
import pytest

from hvd_deepreduce.ops import random
from tests.ops.compare import KEY, same


@pytest.mark.parametrize("numel, count", [(1, 1), (2, 1), (307, 0), (307, 30), (307, 307), (100_003, 999)])
def test_random_indices(gpu, numel, count):
    want = random.indices(numel, count, *KEY, None)
    same(gpu.host(random.indices(numel, count, *KEY, gpu.put(np.zeros(1)))), want)
