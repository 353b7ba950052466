"""The sparsifier ``topk_capped``."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.sparsify.topk_capped import TopKCapped
from tests import cases
from tests.oracle import topk as oracle
from tests.oracle.pipeline import accumulated

KEY = RngKey(1, 2, 3)


def check(dense, gradient, cap, threads=1):
    expected = accumulated(dense, gradient)
    work = dense.copy()
    indices, values = TopKCapped(cap=cap).select(work, gradient, KEY, threads)
    assert indices.size == min(cap, np.count_nonzero(expected))
    for found, wanted in zip((indices, values, work), (*oracle.select(expected, min(cap, dense.size)), expected),
                             strict=True):  # fmt: skip
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found.view(np.uint8), wanted.view(np.uint8))


@given(st.integers(0, 3000), st.integers(1, 4000), st.booleans(), st.sampled_from([np.float32, np.float64]))
def test_equals_topk_of_the_smaller_count(numel, cap, accumulate, dtype):
    check(cases.random(numel, dtype), cases.random(numel, dtype, 1) if accumulate else None, cap)


@pytest.mark.parametrize("name", cases.inputs())
def test_awkward_tensors(name):
    for cap in (1, 100, 1000):
        check(cases.inputs()[name], None, cap)


def test_elements_of_resnet_50_equal_the_paper():
    """A cap of 1000 keeps 99,400 elements per step (Qsparse-local-SGD, section 5)."""
    sizes = [64 * 3 * 49, *[64] * 2, 2048 * 1000, 1000]
    channels, entered = 64, 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        channels = 64 << stage
        for block in range(blocks):
            sizes += [entered * channels, channels * channels * 9, channels * channels * 4]
            sizes += [channels] * 4 + [channels * 4] * 2
            if block == 0:
                sizes += [entered * channels * 4, *[channels * 4] * 2]
            entered = channels * 4
    assert sum(sizes) == 25_557_032
    codec = TopKCapped()
    kept = [codec.select(np.ones(size, np.float32), None, KEY, 1)[0].size for size in sizes]
    assert codec.cap == 1000 and sum(kept) == 99_400


@pytest.mark.parametrize("cap", [0, -1, 2**32, 1.5])
def test_settings_out_of_range(cap):
    with pytest.raises(ValidationError):
        TopKCapped(cap=cap)
