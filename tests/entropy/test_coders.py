"""The entropy coders: bytes equal to those of the oracle, round trips, and sections of wrong sizes.
tests/test_broken_sections.py has other broken ones."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_deepreduce.codecs.entropy import huffman, rans
from tests.oracle import huffman as huffman_oracle
from tests.oracle import rans as rans_oracle

CODERS = {"huffman": (huffman, huffman_oracle), "rans": (rans, rans_oracle)}
both = pytest.mark.parametrize(("coder", "oracle"), CODERS.values(), ids=CODERS)


def streams() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    made = {
        "empty": np.empty(0),
        "one": np.array([200]),
        "equal": np.full(3000, 255),
        "equal_and_long": np.zeros(40000),
        "rare": (rng.random(40000) < 1e-4) * 7 + 2,
        "all_symbols": np.tile(np.arange(256), 5),
        "every_other_symbol": np.tile(np.arange(1, 256, 2), 40),
        "all_symbols_once": np.arange(256)[::-1],
        # Fibonacci numbers as counts make the deepest trees: without the limit, words would be longer than 12 bits.
        "fibonacci": np.repeat(np.arange(18), np.array([1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987,
                                                        1597, 2584])),  # fmt: skip
        "uniform": rng.integers(0, 256, 5000),
    }
    for count in (2, 31, 368, 1023, 1024, 1025, 1027, 2047, 2048, 2051, 32767, 32768, 32799, 40001, 65535, 65536,
                  98_400):
        made[f"geometric_{count}"] = np.minimum(rng.geometric(0.15, count), 255)
    return {name: symbols.astype(np.uint8) for name, symbols in made.items()}


STREAMS = streams()


@both
@pytest.mark.parametrize("symbols", STREAMS.values(), ids=STREAMS)
def test_bytes_equal_the_oracle(coder, oracle, symbols):
    section = coder.encode(symbols)
    assert section.tobytes() == oracle.encode(symbols.tolist())
    np.testing.assert_array_equal(coder.decode(section, symbols.size), symbols)


@both
@given(symbols=st.lists(st.integers(0, 255), max_size=200))
def test_random_symbols(coder, oracle, symbols):
    section = coder.encode(np.array(symbols, np.uint8))
    assert section.tobytes() == oracle.encode(symbols)
    assert coder.decode(section, len(symbols)).tolist() == symbols


def test_rans_reads_the_one_part_of_earlier_releases():
    symbols = STREAMS["geometric_98400"]
    sent = rans_oracle.shares(symbols.tolist())
    section = rans_oracle.table(sent) + rans_oracle.part(symbols.tolist(), sent, 32)  # the shares sum to 4096 already
    assert len(section) < rans.encode(symbols).size
    np.testing.assert_array_equal(rans.decode(np.frombuffer(section, np.uint8), symbols.size), symbols)


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("by", [1, -1, 2**31])
def test_rans_parts_of_wrong_sizes(part, by):
    symbols = STREAMS["geometric_98400"]
    section = rans.encode(symbols)
    assert section[0] == 15
    at = 1 + len(rans_oracle.table(rans_oracle.shares(symbols.tolist()))) + 4 * part
    section[at : at + 4] = (section[at : at + 4].view(np.uint32) + np.uint32(by % 2**32)).view(np.uint8)
    with pytest.raises(ValueError):
        rans.decode(section, symbols.size)


def test_size_is_close_to_the_entropy():
    symbols = np.minimum(np.random.default_rng(5).geometric(0.05, 200_000), 255).astype(np.uint8)
    p = np.bincount(symbols) / symbols.size
    entropy = -np.sum(p[p > 0] * np.log2(p[p > 0])) * symbols.size / 8
    assert entropy < rans.encode(symbols).size < 1.01 * entropy
    assert entropy < huffman.encode(symbols).size < 1.02 * entropy


@pytest.mark.parametrize("sizes", [(0, 0, 0), (1, 1, 1), (7, 7, 7), (3, 120, 3), (2**32 - 1, 0, 0), (2**32 - 1,) * 3])
def test_huffman_streams_of_wrong_sizes(sizes):
    symbols = (np.arange(2000) % 3 == 0).astype(np.uint8)
    section = huffman.encode(symbols)
    section[1:13] = np.array(sizes, np.uint32).view(np.uint8)  # after two lengths of half a byte each
    with pytest.raises(ValueError):
        huffman.decode(section, symbols.size)
