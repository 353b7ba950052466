"""The value codec ``half``. test_oracles.py compares its bytes with the oracle's."""

import numpy as np
import pytest

from hvd_deepreduce.codecs.value.half import Half
from tests.oracle import half as oracle
from tests.value.quantizers import F32, KEY


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_all_words_round_trip_and_ties_round_to_even(kind):
    table = oracle.TABLES[kind]
    exact = table.astype(np.float32)
    section, _ = Half(dtype=kind).encode(exact, None, KEY)
    assert section[2:].view(np.uint16).tolist() == list(range(table.size))
    np.testing.assert_array_equal(Half.decode(section, table.size, None, F32, KEY), exact)
    ties = ((table[1:] + table[:-1]) / 2).astype(np.float32)
    section, _ = Half(dtype=kind).encode(-ties, None, KEY)
    words = section[2:].view(np.uint16) & 0x7FFF
    representable = ties.astype(np.float64) == (table[1:] + table[:-1]) / 2
    assert np.all(words[representable] % 2 == 0)


@pytest.mark.parametrize(
    ("section", "count", "message"),
    [([], 0, "take 2 bytes, not 0"), ([0, 0, 0], 1, "take 4 bytes, not 3"), ([2, 0], 0, "0 .float16. or 1 .bfloat16."),
     ([0, 1], 0, "not 256"), ([0, 0, 0, 0x7C], 1, "not finite"), ([1, 0, 0x80, 0xFF], 1, "not finite"),
     ([1, 0, 0x80, 0x7F], 1, "not finite")],
)  # fmt: skip
def test_sections_that_no_encoder_wrote(section, count, message):
    with pytest.raises(ValueError, match=message):
        Half.decode(np.array(section, np.uint8), count, None, F32, KEY)
