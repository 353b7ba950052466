"""The index codec ``raw``."""

import struct

import numpy as np
import pytest

from hvd_deepreduce.codecs.index.raw import Raw
from hvd_deepreduce.codecs.interfaces import RngKey

KEY = RngKey(1, 2, 3)


@pytest.mark.parametrize("indices", [[], [0], [2**32 - 2], [0, 1, 2], [5, 70000, 2**31]])
def test_layout_and_round_trip(indices):
    kept = np.array(indices, np.uint32)
    section, support = Raw().encode(kept, 2**32 - 1, KEY)
    assert support is kept and section.tobytes() == struct.pack(f"<{len(indices)}I", *indices)
    np.testing.assert_array_equal(Raw.decode(section, 2**32 - 1, len(indices), KEY), kept)


@pytest.mark.parametrize("words", [[1, 1], [2, 1], [1, 10], [10, 1], [0xFFFFFFFF, 0]])
def test_unsorted_or_too_large_indices_are_refused(words):
    with pytest.raises(ValueError, match="out of order or not below"):
        Raw.decode(np.array(words, np.uint32).view(np.uint8), 10, 2, KEY)


@pytest.mark.parametrize("size", [0, 4, 7, 9, 12])
def test_wrong_size(size):
    with pytest.raises(ValueError, match="2 raw indices take 8"):
        Raw.decode(np.zeros(size, np.uint8), 10, 2, KEY)
