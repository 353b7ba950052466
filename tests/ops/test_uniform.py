"""Uniform levels, on the host and on a GPU."""

import numpy as np
import pytest

from hvd_deepreduce.ops import uniform
from tests.ops.compare import KEY, VALUES, both


@pytest.mark.parametrize("name", VALUES)
def test_codes(gpu, name, bucket_size):
    x = VALUES[name][: 200 * bucket_size]
    for dtype in (np.uint8, np.uint16):
        ranges, codes = both(gpu, uniform.encode, x, bucket_size, dtype, *KEY, 1)
        both(gpu, uniform.decode, ranges, codes, bucket_size)
        if x.size:
            ranges[0] = np.inf
            assert both(gpu, uniform.decode, ranges, codes, bucket_size) is None
