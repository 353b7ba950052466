"""The value codec ``lossless``."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hvd_deepreduce.codecs.value.lossless import Lossless
from hvd_deepreduce.ops import lossless
from tests.oracle import lossless as oracle
from tests.value.quantizers import AWKWARD, F32, KEY, normals, round_trip, vectors

CHUNK = oracle.CHUNK


def check(values):
    section, decoded = round_trip(Lossless(), values)
    assert decoded.dtype == values.dtype
    assert decoded.tobytes() == values.tobytes()
    assert section.size <= 1 + values.nbytes
    assert section.tobytes() == oracle.encode(values)
    assert oracle.decode(section.tobytes(), values.size, values.dtype).tobytes() == values.tobytes()
    return section


def check_coded(values):
    """Form 1, even where it takes more bytes than form 0."""
    section = lossless.encode(values)
    decoded = lossless.decode(section, values.size)
    assert decoded.tobytes() == values.tobytes()
    coded = [oracle.encode_chunk(oracle.words(values[i : i + CHUNK])) for i in range(0, values.size, CHUNK)]
    sizes = np.array([len(chunk) for chunk in coded], np.uint16)
    assert section.tobytes() == b"\1" + sizes.tobytes() + b"".join(coded)


@given(vectors, st.booleans())
def test_bytes_are_the_oracle_s(values, double):
    check(values.astype(np.float64) * 1.1 if double else values)


@given(
    arrays(np.uint32, st.integers(0, 300), elements=st.integers(0, 2**32 - 1)), st.integers(0, 23), st.integers(0, 31),
    st.integers(0, 254),
)  # fmt: skip
def test_any_bits_of_a_fraction_and_any_exponents(patterns, unused, exponents, least):
    exponent = np.minimum(least + (patterns >> 23 & exponents), 254)
    kept = patterns & 0x807FFFFF >> unused << unused
    check_coded((kept & 0x807FFFFF | exponent << 23).astype(np.uint32).view(np.float32))


def test_awkward_values():
    for values in AWKWARD.values():
        check(values)
        if values.dtype == np.float32:
            check_coded(values)


@pytest.mark.parametrize("count", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 77])
def test_several_chunks(count):
    values = normals(count)
    values[:700] = 0
    values[:100] *= -1
    check(values)


def test_a_sample_that_is_unlike_the_rest():
    # Seven exponents among those that are counted, and none of these among the others.
    place = np.arange(2 * CHUNK)
    exponents = np.where(place % 64 < 16, place % 7, 7 + place % 248)
    values = (exponents << 23 | place % 2).astype(np.uint32)
    values = values.view(np.float32)
    check_coded(values)
    assert check(values)[0] == 0


def as_bfloat16(values):
    """The upper halves of float32, cut off."""
    return (values.view(np.uint32) & 0xFFFF0000).view(np.float32)


@pytest.mark.parametrize(
    ("like", "bits"), [(lambda x: x, 32), (as_bfloat16, 16), (lambda x: x.astype(np.float16).astype(np.float32), 16)],
    ids=["float32", "bfloat16", "float16"],
)  # fmt: skip
def test_sizes(like, bits):
    values = like(np.random.default_rng(1).standard_normal(50_000).astype(np.float32))
    section = check(values)
    plain, exponent = 32 - 8 if bits == 32 else 8 if like is as_bfloat16 else 11, 3.0
    assert section.size * 8 / values.size < plain + exponent
    zeros = check(np.zeros(50_000, np.float32))
    assert zeros.size * 8 / 50_000 < 2.05  # a sign and a code


def decode(data, count, dtype=F32):
    return Lossless.decode(np.frombuffer(data, np.uint8), count, None, np.dtype(dtype), KEY)


def chunked(*chunks):
    return b"\1" + b"".join(len(chunk).to_bytes(2, "little") for chunk in chunks) + b"".join(chunks)


GOOD = bytes([1, 1, 127, 0b0101, 0b0100])  # bits 1, codes of 1 bit: +-1.0, and one escape
"""Of 3 values: signs 1 0 1, codes 0 0 1, and the other one's exponent, which is still missing."""


def test_a_section_by_hand():
    assert decode(chunked(GOOD + bytes([128])), 3).tolist() == [-1.0, 1.0, -2.0]
    assert decode(b"\1", 0).size == 0
    assert decode(b"\0" + np.array([1.5, -0.0]).tobytes(), 2, np.float64).tolist() == [1.5, 0.0]


@pytest.mark.parametrize(
    ("section", "count", "message"),
    [
        (b"", 0, "begins with nothing"),
        (b"\2", 0, "begins with 02"),
        (b"\0", 1, "has 1 bytes"),
        (b"\0" + bytes(5), 1, "has 6 bytes"),
        (b"\0" + np.float32(np.inf).tobytes(), 1, "not finite"),
        (b"\1", 1, "ends before"),
        (b"\1\0", 0, "do not add up"),
        (chunked(b""), 1, "ends before"),
        (chunked(GOOD), 3, "do not add up|ends before"),
        (chunked(GOOD + bytes([128, 0])), 3, "do not add up"),
        (chunked(GOOD + bytes([128])) + b"\0", 3, "do not add up"),
        (chunked(GOOD + bytes([255])), 3, "not finite"),
        (chunked(bytes([1, 1, 255, 0b0101, 0b0100, 128])), 3, "not finite"),
        (chunked(bytes([0, 1, 127, 0b0101, 0b0100, 128])), 3, "out of range"),
        (chunked(bytes([25, 1, 127, 0b0101, 0b0100, 128]) + bytes(9)), 3, "out of range"),
        (chunked(bytes([1, 16, 127, 0b0101, 0b0100, 128])), 3, "out of range"),
        (chunked(bytes([1, 1, 127, 0b1101, 0b0100, 128])), 3, "other than zeros"),
        (chunked(bytes([1, 1, 127, 0b0101, 0b1100, 128])), 3, "other than zeros"),
        (chunked(bytes([1, 5, 127, 126, 0b0101, 0b0100, 0b10])), 3, "other than zeros"),
    ],
)  # fmt: skip
def test_sections_that_no_encoder_wrote(section, count, message):
    with pytest.raises(ValueError, match=message):
        decode(section, count)


def test_float64_has_no_chunks():
    with pytest.raises(ValueError, match="of float32"):
        decode(chunked(GOOD + bytes([128])), 3, np.float64)


def test_a_short_section_of_many_values_is_refused_before_it_is_read():
    with pytest.raises(ValueError, match="ends before"):
        decode(b"\1" + bytes(2000), 10**9)
