"""A second form of a packed stream of few blocks, whose header of 40 bytes would be most of it.

Where many ranks each own a region of a vector, its sum has some ten elements. A long section (``stream_format``, form
``CODED``) becomes a short one and back; nothing is lost. All numbers are little-endian, and the whole is padded with
zeros to a multiple of 8 bytes::

    byte   0      1          2           3          4               5               6                    7
           | 3 u8 | value u8 | blocks u8 | count u8 | size of a u8  | size of b u8  | size of values u8  | a, b, values

``value`` is the number of the value codec, and 16 times the bits of ``qsgd``. ``a``, ``b`` and ``values`` are those of
the long section, but for what is known: ``b`` is left out if all blocks have one element, and of the values of ``qsgd``
the first 8 bytes are (value/groups.py), which say the bits and the bucket size of 512. The vector and the dtype are
those of the exchange.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hvd_deepreduce.codecs.interfaces import U8, padded
from hvd_deepreduce.codecs.joint.stream_format import CODED, HEADER, SHORT, SHORT_HEADER, value_codec
from hvd_deepreduce.codecs.sparse_tensor import DTYPE_IDS
from hvd_deepreduce.codecs.value.groups import HEADER as BUCKETS
from hvd_deepreduce.codecs.value.qsgd import QSGD

MOST = 255
"""Of blocks, of values, and of the bytes of each part."""


def _known(value_id: int, bits: int) -> bytes:
    """The begin of the values' bytes that a short section leaves out."""
    if value_id != QSGD.id:
        return b""
    codec = value_codec("qsgd", bits)
    assert isinstance(codec, QSGD)
    return BUCKETS.pack(codec.bits, 0, 0, codec.bucket_size)


def _ones(count: int) -> bytes:
    """``b`` of ``count`` blocks of one element: a Rice section of gaps of 0, with the parameter 0."""
    return bytes(1) + ((1 << count) - 1).to_bytes(-(-count // 8), "little")


def shorten(section: U8) -> U8:
    """The short form of a long section that ``stream_format.pack`` has made, on the host; the section itself if it has
    none, or if that is not shorter."""
    data = section.tobytes()
    form, _, value_id, _, blocks, count, a_size, b_size, value_size = HEADER.unpack_from(data)
    if form != CODED or not blocks or max(blocks, count, a_size, b_size) > MOST:
        return section
    b_at = HEADER.size + padded(a_size)
    values_at = b_at + padded(b_size)
    a, b = data[HEADER.size : HEADER.size + a_size], data[b_at : b_at + b_size]
    values = data[values_at : values_at + value_size]
    bits = values[0] if value_id == QSGD.id else 0
    known = _known(value_id, bits)
    if blocks == count and b == _ones(blocks):
        b = b""
    if not values.startswith(known) or len(values) - len(known) > MOST:
        return section
    values = values[len(known) :]
    head = SHORT_HEADER.pack(SHORT, value_id | bits << 4, blocks, count, len(a), len(b), len(values))
    short = head + a + b + values
    return np.frombuffer(bytearray(short.ljust(padded(len(short)), b"\0")), np.uint8)


def lengthen(section: U8, numel: int, dtype: np.dtype[Any]) -> U8:
    """The long section of a short one; a long one itself. Trusts nothing in it: ``stream_format.unpack`` checks what is
    returned.

    Args:
        numel, dtype: of the vector.

    Raises:
        ValueError: the bytes are not those of one short section.
    """
    if not section.size or section[0] != SHORT:
        return section
    data = section.tobytes()
    if len(data) < SHORT_HEADER.size:
        raise ValueError(f"it is truncated: it has {len(data)} bytes, and a short header alone has {SHORT_HEADER.size}")
    _, kind, blocks, count, a_size, b_size, value_size = SHORT_HEADER.unpack_from(data)
    value_id, bits = kind & 15, kind >> 4
    end = SHORT_HEADER.size + a_size + b_size + value_size
    if padded(end) != len(data) or any(data[end:]):
        raise ValueError(f"its short header announces {end} bytes, padded with zeros, and it has {len(data)}")
    if bool(bits) != (value_id == QSGD.id) or bits == 1 or bits > 8 or not blocks:
        raise ValueError(f"its short header has value codec {value_id} with {bits} bits, and {blocks} blocks")
    at = SHORT_HEADER.size
    a, b, values = data[at : at + a_size], data[at + a_size : at + a_size + b_size], data[end - value_size : end]
    if not b and blocks == count:
        b = _ones(blocks)
    values = _known(value_id, bits) + values
    header = HEADER.pack(CODED, DTYPE_IDS[dtype], value_id, numel, blocks, count, len(a), len(b), len(values))
    long = header + b"".join(part.ljust(padded(len(part)), b"\0") for part in (a, b, values))
    return np.frombuffer(bytearray(long), np.uint8)
