"""The index codec ``bitmap``."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_deepreduce.codecs.index.bitmap import Bitmap
from hvd_deepreduce.codecs.interfaces import RngKey
from tests.oracle import bitmap as oracle

KEY = RngKey(1, 2, 3)


@given(st.data(), st.integers(0, 300))
def test_round_trip(data, numel):
    indices = sorted(data.draw(st.sets(st.integers(0, max(numel - 1, 0)), max_size=numel)))
    kept = np.array(indices, np.uint32)
    section, support = Bitmap().encode(kept, numel, KEY)
    assert support is kept and section.tobytes() == oracle.encode(indices, numel)
    assert Bitmap.decode(section, numel, kept.size, KEY).tolist() == indices == oracle.decode(section.tobytes())


@given(st.binary(max_size=40), st.integers(0, 320), st.integers(0, 320))
def test_any_bytes(data, numel, count):
    count = min(count, numel)
    fits = len(data) >= -(-numel // 8) and len(oracle.decode(data)) == count
    fits = fits and all(i < numel for i in oracle.decode(data))
    if fits:
        assert Bitmap.decode(np.frombuffer(data, np.uint8), numel, count, KEY).tolist() == oracle.decode(data)
    else:
        with pytest.raises(ValueError):
            Bitmap.decode(np.frombuffer(data, np.uint8), numel, count, KEY)
