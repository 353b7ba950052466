"""The index codec ``packed``, and bit fields of every width."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_deepreduce.codecs.index.packed import Packed
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.ops import bits
from tests.cases import index_of_any_bytes
from tests.oracle import bitpack as oracle

KEY = RngKey(1, 2, 3)


@given(st.data(), st.integers(1, 32), st.sampled_from([np.uint8, np.uint32]))
def test_fields_of_every_width(data, width, dtype):
    width = min(width, 8 * np.dtype(dtype).itemsize)
    values = data.draw(st.lists(st.integers(0, 2**width - 1), max_size=70))
    section = bits.pack(np.array(values, dtype), width)
    assert section.tobytes() == oracle.pack(values, width)
    assert bits.unpack(section, len(values), width, dtype).tolist() == values == oracle.unpack(
        section.tobytes(), len(values), width
    )
    for wrong in (section[:-1].copy(), np.concatenate([section, np.zeros(1, np.uint8)])):
        if section.size:
            with pytest.raises(ValueError, match=f"it must have {section.size} bytes, and it has {wrong.size}"):
                bits.unpack(wrong, len(values), width, dtype)


@pytest.mark.parametrize(("dtype", "most"), [(np.uint8, 8), (np.uint32, 32)])
@pytest.mark.parametrize("count", [143, 144, 145, 160, 1003])
def test_many_fields_of_every_width(dtype, most, count):
    random = np.random.default_rng(count)
    for width in range(most + 1):
        values = random.integers(0, 2**width, count, dtype=np.uint64).astype(dtype)
        section = bits.pack(values, width)
        assert section.tobytes() == oracle.pack(values.tolist(), width)
        assert (bits.unpack(section, count, width, dtype) == values).all()


@given(st.data())
def test_round_trip(data):
    numel = data.draw(st.one_of(st.integers(1, 70), st.integers(1, 2**32 - 1)))
    indices = sorted(data.draw(st.sets(st.integers(0, numel - 1), max_size=40)))
    kept = np.array(indices, np.uint32)
    section, support = Packed().encode(kept, numel, KEY)
    assert support is kept and section.tobytes() == oracle.pack(indices, oracle.width_of(numel))
    np.testing.assert_array_equal(Packed.decode(section, numel, kept.size, KEY), kept)


@pytest.mark.parametrize("numel", [0, 1])
def test_tensors_of_at_most_one_element(numel):
    kept = np.arange(numel, dtype=np.uint32)
    section, _ = Packed().encode(kept, numel, KEY)
    assert section.size == 0
    np.testing.assert_array_equal(Packed.decode(section, numel, numel, KEY), kept)


@given(st.binary(max_size=40), st.integers(1, 300), st.integers(0, 60))
def test_any_bytes(data, numel, count):
    index_of_any_bytes(Packed, data, numel, count)
