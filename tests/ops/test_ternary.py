"""Packed ternary digits, on the host and on a GPU."""

import pytest

from hvd_deepreduce.ops import groups, qsgd, ternary
from tests.ops.compare import KEY, VALUES, both


@pytest.mark.parametrize("name", VALUES)
def test_digits(gpu, name):
    x = VALUES[name]
    digits = qsgd.quantize(x, groups.norms(x, 64, False), 64, 1, *KEY, 0)
    packed = both(gpu, ternary.pack, digits)
    both(gpu, ternary.unpack, packed, x.size)
    if x.size:
        assert both(gpu, ternary.unpack, packed[:-1], x.size) is None
        for wrong in (243, 255):
            packed[-1] = wrong
            assert both(gpu, ternary.unpack, packed, x.size) is None
