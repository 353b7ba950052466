"""The value codecs ``deflate`` and ``zstd``."""

import struct
import tracemalloc
import zlib

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from hvd_deepreduce.codecs.value.deflate import Deflate
from hvd_deepreduce.codecs.value.zstd import Zstd
from tests.value.quantizers import AWKWARD, KEY, normals, round_trip, vectors

CODECS = [Deflate, Zstd]
COMPRESS = {Deflate: zlib.compress, Zstd: lambda data: zstandard.ZstdCompressor().compress(data)}


def expand(codec, data):
    if codec is Deflate:
        return zlib.decompress(data)
    return zstandard.ZstdDecompressor().decompress(data)


def slow_bytes(values, shuffle):
    """The bytes of the values, by the definition of ``shuffle``."""
    each = [struct.pack("<f" if values.dtype == np.float32 else "<d", x) for x in values.tolist()]
    if shuffle:
        return bytes(value[place] for place in range(values.itemsize) for value in each)
    return b"".join(each)


def check(codec, values):
    section, decoded = round_trip(codec, values)
    assert decoded.dtype == values.dtype
    assert decoded.tobytes() == values.tobytes()
    assert section[0] == codec.shuffle
    assert expand(type(codec), section[1:].tobytes()) == slow_bytes(values, codec.shuffle)


@pytest.mark.parametrize("codec", CODECS)
@given(vectors, st.booleans(), st.booleans(), st.integers(1, 9))
def test_lossless_with_the_documented_layout(codec, values, double, shuffle, level):
    check(codec(shuffle=shuffle, level=level), values.astype(np.float64) * 1.1 if double else values)


@pytest.mark.parametrize("codec", CODECS)
def test_awkward_values(codec):
    for values in AWKWARD.values():
        check(codec(), values)


@pytest.mark.parametrize("codec", CODECS)
def test_sizes(codec):
    values = normals(20_000)
    plain, shuffled = (round_trip(codec(shuffle=s), values)[0].size for s in (False, True))
    assert shuffled < 0.9 * values.nbytes
    assert shuffled < plain
    assert round_trip(codec(), np.zeros(100_000, np.float32))[0].size < 1000


@pytest.mark.parametrize("codec", CODECS)
def test_decompression_bomb_is_refused_without_decompressing(codec):
    bomb = np.frombuffer(b"\0" + COMPRESS[codec](bytes(2**28)), np.uint8)
    tracemalloc.start()
    with pytest.raises(ValueError):
        codec.decode(bomb, 100, None, np.dtype(np.float32), KEY)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**22


@pytest.mark.parametrize("codec", CODECS)
def test_invalid_streams_are_refused(codec):
    def decode(data, count=4):
        return codec.decode(np.frombuffer(data, np.uint8), count, None, np.dtype(np.float32), KEY)

    good = COMPRESS[codec](bytes(16))
    assert np.array_equal(decode(b"\0" + good), np.zeros(4))
    for bad in (b"\2" + good, b"\0" + good + b"x", b"\0" + good + good, b"\0", b"", b"\0nonsense"):
        with pytest.raises(ValueError, match=r"\w+ \w+ \w+"):
            decode(bad)
    for value in (np.inf, -np.inf, np.nan):
        with pytest.raises(ValueError, match="finite"):
            decode(b"\0" + COMPRESS[codec](np.array([0, 1, value, 2], np.float32).tobytes()))
    if codec is Zstd:
        unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(16))
        with pytest.raises(ValueError, match="frame holds"):
            decode(b"\0" + unsized)
