"""Norms, sums, means and clipped scales of buckets, on the host and on a GPU."""

import pytest

from hvd_deepreduce.ops import groups
from tests import cases
from tests.ops.compare import VALUES, both


@pytest.mark.parametrize("name", VALUES)
def test_norms_sums_means_and_scales(gpu, name, bucket_size):
    x = VALUES[name][: 200 * bucket_size]
    both(gpu, groups.means, x, bucket_size)
    for flag in (False, True):
        both(gpu, groups.norms, x, bucket_size, flag)
        both(gpu, groups.sums, x, bucket_size, flag)
    both(gpu, groups.clip_scales, groups.norms(x, bucket_size, False), x, bucket_size, 1.5)


def test_sums_of_many_levels(gpu):
    """Buckets of more than 1024^2 values take three levels of sums."""
    x = cases.random(1_050_000)
    both(gpu, groups.sums, x, x.size, True)
    both(gpu, groups.sums, x, 1_048_577, False)
