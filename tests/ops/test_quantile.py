"""Quantile buckets, on the host and on a GPU."""

import numpy as np
import pytest

from hvd_deepreduce.ops import quantile
from tests.ops.compare import VALUES, both


@pytest.mark.parametrize("name", sorted(set(VALUES) - {"empty"}))
@pytest.mark.parametrize("buckets", [2, 3, 16, 256, 5000])
def test_buckets_and_means(gpu, name, buckets):
    for middle in (False, True):
        means, codes, _ = both(gpu, quantile.encode, VALUES[name], buckets, middle)
        both(gpu, quantile.encode, -np.abs(VALUES[name]), buckets, middle)
        both(gpu, quantile.decode, means, codes)
        ordered, codes, negative = both(gpu, quantile.encode, VALUES[name], buckets, middle, False)
        assert negative == 0 and (np.diff(ordered) >= 0).all()
    assert both(gpu, quantile.decode, ordered[:-1], codes) is None


def test_neighbouring_floats(gpu):
    """Values that fill buckets, and the floats next to them, which are splits already."""
    near = np.float32(1).view(np.uint32) + np.arange(6, dtype=np.uint32)
    rng = np.random.default_rng(1)
    for counts in ([50, 1, 50, 1, 1, 1], [40, 40, 40, 1, 90, 2], [1, 1, 70, 70, 3, 70]):
        x = rng.permutation(np.repeat(near, counts).view(np.float32)) * rng.choice(np.float32([1, -1]), sum(counts))
        for buckets in (2, 5, 7, 30):
            both(gpu, quantile.encode, x, buckets, False)
            both(gpu, quantile.encode, np.abs(x), buckets, False)
            both(gpu, quantile.encode, x, buckets, False, False)


@pytest.mark.parametrize(
    "negatives, zeros, positives", [(0, 5, 0), (3, 5, 0), (0, 5, 3), (3, 5, 3), (1, 0, 900), (900, 9, 1)]
)
def test_signs_share_the_buckets(gpu, negatives, zeros, positives):
    rng = np.random.default_rng(negatives)
    parts = [-1 - rng.random(negatives), np.zeros(zeros), 1 + rng.random(positives)]
    x = rng.permutation(np.concatenate(parts).astype(np.float32))
    for buckets in (2, 3, 4, 64):
        means, codes, negative = both(gpu, quantile.encode, x, buckets, False)
        assert means.size <= buckets and negative == (means < 0).sum()
        assert (np.sign(means[codes]) == np.sign(x)).all() or buckets == 2
