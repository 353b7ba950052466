"""Bloom filters give the same bytes on the host and on a GPU."""

import numpy as np
import pytest

from hvd_deepreduce.ops import bloom
from tests.ops.compare import INDICES, KEY, both


@pytest.mark.parametrize("name", sorted(set(INDICES) - {"far"}))
@pytest.mark.parametrize("hashes, bits", [(1, 3), (10, 15), (30, 44)])
def test_bloom(gpu, name, hashes, bits):
    indices, numel = INDICES[name]
    if numel > 2**19:
        numel, indices = 2**14, indices[:1]
    bits = both(gpu, bloom.insert, indices, max(8, indices.size * bits // 8), hashes, *KEY)
    both(gpu, bloom.query, bits, hashes, numel, *KEY)
    both(gpu, bloom.query, np.full(9, 255, np.uint8), hashes, 1003, *KEY)


def test_conflict_sets(gpu):
    indices, numel = INDICES["some"]
    bits = bloom.insert(indices, 400, 8, *KEY)
    positives = bloom.query(bits, 8, numel, *KEY)
    both(gpu, bloom.conflict_sets, positives, indices.size, 10**6, 400, 8, *KEY)
