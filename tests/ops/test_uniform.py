"""Uniform levels, on the host and on a GPU."""

import numpy as np
import pytest

from hvd_deepreduce.ops import uniform
from tests.ops.compare import KEY, VALUES, both


@pytest.mark.parametrize("name", VALUES)
def test_codes(gpu, name, bucket_size):
    x = VALUES[name][: 200 * bucket_size]
    for steps in (1, 7, 255, 4095, 65535):
        ranges, codes = both(gpu, uniform.encode, x, bucket_size, steps, *KEY, 1)
        assert codes.dtype == uniform.code_dtype(steps) and codes.max(initial=0) <= steps
        both(gpu, uniform.decode, ranges, codes, bucket_size, steps)
        fitted = both(gpu, uniform.fit_ranges, x, codes, ranges, bucket_size, steps)
        both(gpu, uniform.decode, fitted, codes, bucket_size, steps)
        if x.size:
            ranges[0] = np.inf
            assert both(gpu, uniform.decode, ranges, codes, bucket_size, steps) is None
