"""Hashes of parts of an array: see conftest.py. tests/exchange/test_messages.py tests what the hash finds."""

import numpy as np
import pytest

from hvd_deepreduce.ops import hash
from hvd_deepreduce.ops.hash import hash64
from tests import cases
from tests.ops.compare import both


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_hashes_of_parts(gpu, dtype):
    """At any place, of any size: less than a word, than a stripe of 64 bytes, than what a block takes at once."""
    dense = cases.random(9001, dtype)
    parts = [(0, 9001), (1, 2), (1, 3), (3, 18), (7, 7 + 16), (7, 7 + 17), (11, 4000), (9000, 9001), (5, 5)]
    found = both(gpu, hash.hash_parts, dense, parts)
    assert found == [hash64(dense[i:j].copy()) for i, j in parts] and len(set(found)) == len(parts)
    both(gpu, hash.hash_parts, dense, parts[3:4])
    both(gpu, hash.hash_parts, dense, [])


def test_a_changed_bit_changes_the_hash_of_its_part_only(gpu):
    dense, parts = cases.random(3000), [(0, 1000), (1000, 1999), (1999, 3000)]
    before = hash.hash_parts(gpu.put(dense), parts)
    dense.view(np.uint32)[1998] ^= 1 << 9
    after = hash.hash_parts(gpu.put(dense), parts)
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False, True]
