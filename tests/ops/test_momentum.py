"""The velocity of deep gradient compression, on the host and on a GPU."""

import numpy as np
import pytest

from hvd_deepreduce.ops import momentum
from tests.ops.compare import INPUTS, both, some_indices


@pytest.mark.parametrize("name", INPUTS)
def test_correct_and_keep(gpu, name):
    x = INPUTS[name]
    y = x[::-1].copy()  # a reversed view of one element is the element itself
    for nesterov in (False, True):
        corrected, _ = both(gpu, momentum.correct, x, y, 0.9, 0.7, nesterov)
        for sent in (None, some_indices(x.size, x.size // 2), np.empty(0, np.uint32)):
            both(gpu, momentum.keep, x, corrected, sent)
    if x.size:
        y[x.size // 2] = np.nan
        corrected, sent = both(gpu, momentum.correct, x, y, 0.9, 0.7, True)
        assert np.isnan(corrected[x.size // 2]) and np.isnan(sent).sum() == 1
    assert momentum.clip_scale(x, 0.5) == momentum.clip_scale(gpu.put(x), 0.5)
