"""Block norms and block indices are the same bytes on the host and on a GPU."""

import numpy as np
import pytest

from hvd_deepreduce.ops import blocks
from tests.ops.compare import INPUTS, both


@pytest.mark.parametrize("name", INPUTS)
def test_norms(gpu, name):
    x = INPUTS[name]
    for block in (1, 7, 64, 1000):
        for l2 in (True, False):
            both(gpu, blocks.norms, x, None, block, l2)
            both(gpu, blocks.norms, x, x, block, l2)


@pytest.mark.parametrize("numel, block", [(10, 64), (100, 7), (98, 7), (2**32 - 1, 2**31), (5000, 1)])
def test_indices(gpu, numel, block):
    count = -(-numel // block)
    for kept in {(0,), (count - 1,), (0, count - 1) if count > 1 else (0,)} if block < 2**20 else ():
        both(gpu, blocks.indices, np.array(kept, np.uint32), block, numel)
