"""The value codec ``raw``."""

import numpy as np
import pytest

from hvd_deepreduce.codecs.value.raw import Raw
from tests.value.quantizers import AWKWARD, KEY, round_trip


@pytest.mark.parametrize("values", AWKWARD.values(), ids=AWKWARD)
def test_lossless(values):
    section, decoded = round_trip(Raw(), values)
    assert section.tobytes() == values.astype(values.dtype.newbyteorder("<")).tobytes()
    assert decoded.dtype == values.dtype and decoded.tobytes() == values.tobytes()


@pytest.mark.parametrize("size", [0, 1, 11, 13, 24])
def test_wrong_size(size):
    with pytest.raises(ValueError, match="3 float32 values take 12 bytes"):
        Raw.decode(np.zeros(size, np.uint8), 3, None, np.dtype(np.float32), KEY)
