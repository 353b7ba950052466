"""Splits of least squared error, on the host and on a GPU."""

import numpy as np
import pytest

from hvd_deepreduce.ops import lloyd, quantile
from tests.ops.compare import VALUES, both


@pytest.mark.parametrize("name", sorted(set(VALUES) - {"empty"}))
@pytest.mark.parametrize("buckets", [2, 4, 64])
def test_histogram_codes_and_means(gpu, name, buckets):
    x = VALUES[name]
    counts, sums = lloyd.histogram(x)
    for one, other in zip((counts, sums), lloyd.histogram(gpu.put(x)), strict=True):
        np.testing.assert_array_equal(one, other)
    for values in (x, -np.abs(x), np.abs(x)):
        means, codes = quantile.lloyd(values, buckets)
        on_gpu = quantile.lloyd(gpu.put(values), buckets)
        for want, got in zip((means, codes), on_gpu, strict=True):
            np.testing.assert_array_equal(gpu.host(got), want)
        assert means.size <= max(buckets, 2) and codes.max() < means.size
    below, above = np.uint32([0, 5]), np.uint32([0])
    assert both(gpu, lambda values: lloyd.codes(values, below, above), x).max() <= 2
