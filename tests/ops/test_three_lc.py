"""3LC's packed digits and runs of zeros, on the host and on a GPU."""

import numpy as np
import pytest

from hvd_deepreduce.ops import three_lc
from tests.ops.compare import VALUES, both, same


@pytest.mark.parametrize("name", VALUES)
def test_values(gpu, name):
    x = VALUES[name]
    for m in (0.0, 0.5, 1e38):
        packed = both(gpu, three_lc.pack, x, m)
        both(gpu, three_lc.unpack, packed, x.size, m)
        runs = both(gpu, three_lc.zero_runs_encode, packed)
        both(gpu, three_lc.zero_runs_decode, runs, packed.size)
        assert both(gpu, three_lc.zero_runs_decode, runs, packed.size + 1) is None
        if x.size:
            assert both(gpu, three_lc.zero_runs_decode, runs, packed.size - 1) is None
            assert both(gpu, three_lc.unpack, packed[:-1], x.size, m) is None
        assert both(gpu, three_lc.unpack, packed, x.size, -1.0) is None
    for wrong in (243, 255):
        if x.size:
            packed[-1] = wrong
            assert both(gpu, three_lc.unpack, packed, x.size, 0.5) is None


def test_zero_runs(gpu):
    rng = np.random.default_rng(0)
    for length in (1, 2, 13, 14, 15, 16, 28, 29, 400, 3000):
        packed = np.full(length, 121, np.uint8)
        both(gpu, three_lc.zero_runs_encode, packed)
        packed[rng.integers(length, size=length // 20)] = 7
        section = both(gpu, three_lc.zero_runs_encode, packed)
        same(both(gpu, three_lc.zero_runs_decode, section, length), packed)
