"""The value codec ``half``."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from pydantic import ValidationError

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.value.half import Half
from tests import cases
from tests.oracle import half as oracle

KEY = RngKey(1, 2, 3)
F32 = np.dtype(np.float32)
FINITE = st.floats(allow_nan=False, allow_infinity=False, width=32)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@given(values=arrays(np.float32, st.integers(0, 50), elements=FINITE))
def test_rounds_to_the_nearest_value(kind, values):
    section, order = Half(dtype=kind).encode(values, None, KEY)
    assert order is None and section.tobytes() == oracle.encode(values, kind)
    np.testing.assert_array_equal(Half.decode(section, values.size, None, F32, KEY), oracle.decode(section.tobytes()))


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_all_words_round_trip_and_ties_round_to_even(kind):
    table = oracle.TABLES[kind]
    exact = table.astype(np.float32)
    section, _ = Half(dtype=kind).encode(exact, None, KEY)
    assert section[2:].view(np.uint16).tolist() == list(range(table.size))
    ties = ((table[1:] + table[:-1]) / 2).astype(np.float32)
    section, _ = Half(dtype=kind).encode(-ties, None, KEY)
    words = section[2:].view(np.uint16) & 0x7FFF
    representable = ties.astype(np.float64) == (table[1:] + table[:-1]) / 2
    assert np.all(words[representable] % 2 == 0)


@pytest.mark.parametrize("name", cases.inputs())
@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_error_is_at_most_half_a_unit(kind, name):
    values = cases.inputs()[name]
    section, _ = Half(dtype=kind).encode(values, None, KEY)
    decoded = Half.decode(section, values.size, None, values.dtype, KEY).astype(np.float64)
    table = oracle.TABLES[kind]
    inside = np.clip(values.astype(np.float64), -table[-1], table[-1])
    unit = np.maximum(np.abs(inside) * (2.0**-11 if kind == "float16" else 2.0**-8), table[1] / 2)
    assert np.all(np.abs(decoded - inside) <= unit * (1 + 1e-6))


@pytest.mark.parametrize(
    ("section", "count", "message"),
    [([], 0, "take 2 bytes, not 0"), ([0, 0, 0], 1, "take 4 bytes, not 3"), ([2, 0], 0, "0 .float16. or 1 .bfloat16."),
     ([0, 1], 0, "not 256"), ([0, 0, 0, 0x7C], 1, "not finite"), ([1, 0, 0x80, 0xFF], 1, "not finite"),
     ([1, 0, 0x80, 0x7F], 1, "not finite")],
)  # fmt: skip
def test_sections_that_no_encoder_wrote(section, count, message):
    with pytest.raises(ValueError, match=message):
        Half.decode(np.array(section, np.uint8), count, None, F32, KEY)


def test_settings_out_of_range():
    with pytest.raises(ValidationError):
        Half(dtype="float8")
