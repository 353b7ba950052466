"""The bytes of a ``Stream``: one format for the joint codec's section in a container and for the exchanges' messages.

All numbers are little-endian. The parts a, b and values are each padded with zeros to a multiple of 8 bytes::

    byte   0           1           2                3          4            8             12            16
           | form u8   | dtype u8  | value codec u8 | 0 u8     | numel u32  | blocks u32  | count u32   |
    byte  16                 24                 32                     40
           | size of a u64   | size of b u64    | size of values u64    | a ... | b ... | values ...    |

``count`` is the number of values; sizes are in bytes, without padding. a and b depend on the form:

====  ===========================  =========================================  ==================================
form  name                         a                                          b
====  ===========================  =========================================  ==================================
0     ``PLAIN``: blocks            starts, uint32 ``[blocks]``                lengths, uint32 ``[blocks]``
1     ``CODED``: coded blocks      Rice section of the numbers of elements    Rice section of the lengths,
                                   between block i - 1 and block i            each less 1
2     ``PAIRS``: key-value pairs   indices, uint32 ``[blocks]``; every block  empty
                                   has one element
====  ===========================  =========================================  ==================================

Rice sections are specified in kernels/rice/rice.cpp. In form 1 the elements before block 0 are counted from ``begin``,
the first element of the range that sender and receiver have agreed on: 0 in a container, the region's or slice's first
element in an exchange.

Source of the plain form: DenseStream, sections III.A and IV.A (starts and lengths are unsigned 32-bit integers). The
coded form is ours.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from hvd_deepreduce.codecs.interfaces import U8, U32, Floats, RngKey, ValueCodec, padded
from hvd_deepreduce.codecs.joint.stream import Stream
from hvd_deepreduce.codecs.sparse_tensor import DTYPE_IDS, DTYPES
from hvd_deepreduce.codecs.value.half import Half
from hvd_deepreduce.codecs.value.qsgd import QSGD
from hvd_deepreduce.codecs.value.raw import Raw
from hvd_deepreduce.ops import arrays, deferred, densestream, sections, stream_exchange, stream_supports

PLAIN, CODED, PAIRS = 0, 1, 2
HEADER = struct.Struct("<BBBxIIIQQQ")
SHORT, SHORT_HEADER = 3, struct.Struct("<7B")
"""The first byte, and the header, of a section that ``short_stream`` has shortened; in exchanges only."""
ROOM = 40
"""Bytes in memory before a section that ``pack`` makes: an exchange's header fits there, and nothing is copied."""

ValueName = Literal["raw", "float16", "bfloat16", "qsgd"]
VALUE_CODECS: dict[int, type[ValueCodec]] = {codec.id: codec for codec in (Raw, Half, QSGD)}
"""The value codecs that a stream may use, by their number in its header."""


def value_codec(value: ValueName, bits: int) -> ValueCodec:
    """The codec of a stream's values.

    Args:
        bits: bits per value, for ``qsgd`` only.
    """
    if value == "qsgd":
        return QSGD(bits=bits)
    return Raw() if value == "raw" else Half(dtype=value)


def pack(
    stream: Stream,
    form: int,
    codec: ValueCodec | None = None,
    key: RngKey | None = None,
    begin: int = 0,
    end: int = 0,
    finite: bool = False,
) -> U8:
    """A stream's bytes, uint8; their number is a multiple of 8. On the host, ``ROOM`` bytes before them are free.

    Args:
        form: ``PLAIN``, ``CODED``, or ``PAIRS`` for a stream of blocks of one element.
        codec: the codec of the values. None: raw. Values that are not all finite are always packed raw.
        key: the randomness of a codec that rounds at random.
        begin, end: the range that contains all blocks, for coded blocks only. ``end`` 0: the end of the vector.
        finite: whether the values are known to be finite; otherwise this is found out.
    """
    if codec is None or (codec.id != Raw.id and not finite and not deferred.finite(stream.values)):
        codec = Raw()
    values, _ = codec.encode(stream.values, None, key or RngKey(0, 0, 0))
    starts = stream.indices() if form == PAIRS else stream.starts
    kind = form, DTYPE_IDS[stream.values.dtype], codec.id, stream.numel, starts.size, stream.values.size
    if form == CODED and starts.size:

        def header(a: int, b: int) -> bytes:
            return HEADER.pack(*kind, a, b, values.size)

        end = end or stream.numel
        return stream_exchange.pack_coded(header, starts, stream.lengths, values, stream.values.size, begin, end, ROOM)
    a, b = starts.view(np.uint8), (starts[:0] if form == PAIRS else stream.lengths).view(np.uint8)
    out: U8 = sections.join(HEADER.pack(*kind, a.size, b.size, values.size), a, b, values, pad=8, room=ROOM)
    return out


def packed_values(section: U8, dtype: np.dtype[Any]) -> Floats:
    """The values that ``unpack`` will decode from a section that ``pack`` has made on this rank, block after block."""
    _, _, value_id, _, _, count, a, b, size = HEADER.unpack(sections.peek(section, HEADER.size))
    begin = HEADER.size + padded(a) + padded(b)
    key = RngKey(0, 0, 0)  # no value codec of a stream needs it for decoding
    values = VALUE_CODECS[value_id].decode(section[begin : begin + size], count, None, dtype, key)
    return values.astype(dtype, copy=False)


def packed_size(data: U8) -> int:
    """The number of bytes of the packed stream at the start of ``data``; more bytes may follow it.

    Raises:
        ValueError: ``data`` is shorter than the stream.
    """
    head = sections.peek(data, HEADER.size)
    if len(head) >= SHORT_HEADER.size and head[0] == SHORT:
        size = padded(SHORT_HEADER.size + sum(SHORT_HEADER.unpack_from(head)[-3:]))
        if size > data.size:
            raise ValueError(f"it is truncated: its short header announces {size} bytes, and it has {data.size}")
        return size
    if data.size < HEADER.size:
        raise ValueError(f"it is truncated: it has {data.size} bytes, and a stream's header alone has {HEADER.size}")
    size = HEADER.size + sum(map(padded, HEADER.unpack(head)[-3:]))
    if size > data.size:
        raise ValueError(f"it is truncated: its header announces {size} bytes, and it has {data.size}")
    return size


def check_kind(section: U8, forms: tuple[int, ...], values: tuple[int, ...] = (Raw.id,)) -> None:
    """Checks that a section has one of the forms and value codecs that its sender was to use.

    Raises:
        ValueError: it has another one.
    """
    form, _, value = (section[:3] if section.size >= 3 else np.zeros(3, np.uint8)).tolist()
    if form not in forms or value not in values:
        raise ValueError(
            f"it has form {form} and value codec {value}; here the form must be {' or '.join(map(str, forms))} and the "
            f"value codec {' or '.join(map(str, values))}"
        )


def unpack(
    section: U8, numel: int, dtype: np.dtype[Any], key: RngKey | None = None, begin: int = 0, end: int | None = None
) -> Stream:
    """The stream that ``pack`` wrote to ``section``. Trusts nothing in it.

    Args:
        section: uint8; exactly one packed stream.
        numel, dtype: the vector that the stream must belong to.
        key: the sender's ``key``.
        begin, end: the range that must contain all blocks; ``pack``'s range. ``end`` None: ``numel``.

    Raises:
        ValueError: the section is truncated or damaged, or belongs to another vector, dtype or range.
    """
    form, value_id, blocks, count, (a, b, values) = _parts(section, numel, dtype, begin, numel if end is None else end)
    parts = [section[at : at + size] for at, size in (a, b, values)]
    sections.check_padding(section, [at + size for at, size in (a, b, values)])
    # Values first: a section that is too short for its count is refused before arrays of that size are allocated.
    decoded: Floats = VALUE_CODECS[value_id].decode(parts[2], count, None, dtype, key or RngKey(0, 0, 0))
    end = numel if end is None else end
    if form == CODED and blocks:
        starts, lengths = stream_exchange.unpack_coded(parts[0], parts[1], blocks, begin, end, count)
    else:
        starts = parts[0].view(np.uint32)
        pairs = form == PAIRS
        lengths = arrays.move_like(np.ones(blocks, np.uint32), starts) if pairs else parts[1].view(np.uint32)
        densestream.check_blocks(starts, lengths, begin, end, count)
    return Stream(numel, starts, lengths, decoded.astype(dtype, copy=False))


def unpack_supports(
    streams: Sequence[U8], numel: int, counts: Sequence[int], dtype: np.dtype[Any], key: RngKey
) -> list[tuple[U32 | None, Floats]] | None:
    """On a GPU: the indices and values of streams of a whole vector, which were taken apart together, in one set of
    launches. Trusts nothing in them; the check of their bytes may be deferred.

    Args:
        streams: uint8; exactly one packed stream each.
        counts: the numbers of their values.
        numel, dtype, key: as for ``unpack``.

    Returns:
        None: they are of several forms, of key-value pairs, or empty, so ``unpack`` must look at each.

    Raises:
        ValueError: as ``unpack``, or a value is not finite.
    """
    found = sections.place_of(streams)
    heads = [_parts(section, numel, dtype, 0, numel) for section in streams]
    (form, *_), *_ = heads
    if found is None or form == PAIRS or any(head[0] != form or not head[2] for head in heads):
        return None
    known, decoded = [], []
    for section, count, (_, value_id, blocks, holds, places) in zip(streams, counts, heads, strict=True):
        if holds != count:
            raise ValueError(f"its blocks hold {holds} elements, and its container announces {count}")
        at, size = places[2]
        values = VALUE_CODECS[value_id].decode(section[at : at + size], count, None, dtype, key)
        raw = value_id == Raw.id
        if not raw:
            deferred.check_finite(values)
        decoded.append(values.astype(dtype, copy=False))
        known.append(stream_supports.Section(*places, form == CODED, raw, blocks, count))
    supports = stream_supports.supports(*found, known, numel, dtype)
    return list(zip(supports, decoded, strict=True))


Place = tuple[int, int]
"""Where a part of a section begins, and its bytes."""


def _parts(
    section: U8, numel: int, dtype: np.dtype[Any], begin: int, end: int
) -> tuple[int, int, int, int, tuple[Place, Place, Place]]:
    """What a header says: form, number of the value codec, numbers of blocks and of values, and the places of the
    parts.

    Raises:
        ValueError: as ``unpack``, as far as the header shows it.
    """
    if packed_size(section) != section.size:
        raise ValueError(f"it has {section.size - packed_size(section)} bytes after its stream, where none are allowed")
    head = sections.peek(section, HEADER.size)
    if head[0] == SHORT:
        raise ValueError(f"it has form {SHORT}, which only an exchange may send; forms 0 to {PAIRS} are allowed")
    form, dtype_id, value_id, length, blocks, count, *sizes = HEADER.unpack(head)
    if length != numel:
        raise ValueError(f"it belongs to a vector of {length} elements, and this vector has {numel}")
    if form > PAIRS or value_id not in VALUE_CODECS or head[3]:
        raise ValueError(
            f"it has form {form}, value codec {value_id} and reserved byte {head[3]}; forms 0 to {PAIRS}, value codecs "
            f"{', '.join(map(str, VALUE_CODECS))}, and 0 are allowed"
        )
    if DTYPES.get(dtype_id) != dtype:
        raise ValueError(f"its values have dtype number {dtype_id}, and {DTYPE_IDS[dtype]} ({dtype}) is required")
    if not blocks <= count <= end - begin:
        raise ValueError(
            f"it has {count} values in {blocks} blocks for a range of {end - begin} elements; at least one value per "
            "block and at most one per element are allowed"
        )
    places, at = [], HEADER.size
    for size in sizes:
        places.append((at, size))
        at += padded(size)
    a, b, values = places
    expected = (4 * blocks, 4 * blocks if form == PLAIN else 0)
    # Coded parts have the sizes of their codes, but for no blocks they are empty.
    if (form != CODED or not blocks) and (a[1], b[1]) != expected:
        raise ValueError(
            f"its parts a and b have {a[1]} and {b[1]} bytes; {blocks} blocks take {expected[0]} and {expected[1]}"
        )
    return form, value_id, blocks, count, (a, b, values)
