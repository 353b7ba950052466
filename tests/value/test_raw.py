"""The value codec ``raw``."""

import numpy as np
import pytest

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.value.raw import Raw
from tests import cases

KEY = RngKey(1, 2, 3)


@pytest.mark.parametrize("name", cases.inputs())
def test_lossless(name):
    values = cases.inputs()[name]
    section, order = Raw().encode(values, None, KEY)
    assert order is None and section.tobytes() == values.astype(values.dtype.newbyteorder("<")).tobytes()
    decoded = Raw.decode(section, values.size, None, values.dtype, KEY)
    assert decoded.dtype == values.dtype and decoded.tobytes() == values.tobytes()


@pytest.mark.parametrize("size", [0, 1, 11, 13, 24])
def test_wrong_size(size):
    with pytest.raises(ValueError, match="3 float32 values take 12 bytes"):
        Raw.decode(np.zeros(size, np.uint8), 3, None, np.dtype(np.float32), KEY)
