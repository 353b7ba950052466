"""DenseStream: a sparse vector as blocks of neighbours, from very sparse to dense in one format.

Li, Chao, Liao, Lv, "DenseStream: a novel data representation for gradient sparsification in distributed synchronous
SGD algorithms", section III.A. ``Stream`` is the representation, with the sum of two streams and the cut at a boundary;
``pack`` and ``unpack`` are its bytes, in a container as well as in an exchange; ``DenseStream`` is the joint codec.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import Field

from hvd_deepreduce.codec import U8, U32, Floats, JointCodec, Key, ValueCodec, joint_codecs, padded, value_codecs
from hvd_deepreduce.ops import arrays, deferred, densestream, rice, sections
from hvd_deepreduce.sparse import SparseTensor
from hvd_deepreduce.value.half import Half
from hvd_deepreduce.value.qsgd import QSGD
from hvd_deepreduce.value.raw import Raw

PLAIN, CODED, PAIRS = 0, 1, 2
HEADER = struct.Struct("<BBBxIIIQQQ")
DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype(np.float32), 2: np.dtype(np.float64)}
DTYPE_IDS = {dtype: number for number, dtype in DTYPES.items()}
CODED_BLOCK_BITS = 10
"""What a coded block of one element costs besides its value, about, at a density of 1%."""

ValueName = Literal["raw", "float16", "bfloat16", "qsgd"]


def plain_gap(numel: int, value_bits: int) -> int:
    """The most zeros in a row that a block may hold: ceil(2 ceil(log2 N / 8) / K) for N elements of K bytes."""
    index_bytes = max(1, -(-(numel - 1).bit_length() // 8))
    return -(-2 * index_bytes * 8 // value_bits)


def coded_gap(value_bits: int) -> int:
    """The same for coded blocks: as many zeros as cost no more than another block would."""
    return CODED_BLOCK_BITS // value_bits


@dataclass(frozen=True)
class Stream:
    """A sparse vector in blocks.

    Attributes:
        numel: elements of the whole vector, zeros too.
        starts, lengths: uint32 ``[blocks]``; blocks are sorted and do not overlap.
        values: float32 or float64, those of the first block, then of the next; zeros inside a block are there.
    """

    numel: int
    starts: U32
    lengths: U32
    values: Floats

    @classmethod
    def encode(cls, tensor: SparseTensor, gap: int) -> Stream:
        """The blocks of a sparse tensor; more than ``gap`` zeros in a row end one."""
        indices, values = np.ascontiguousarray(tensor.indices), np.ascontiguousarray(tensor.values)
        return cls.of_pairs(tensor.numel, indices, values, gap)

    @classmethod
    def of_pairs(cls, numel: int, indices: U32, values: Floats, gap: int) -> Stream:
        """The same of indices and values that are known to be in order."""
        return cls(numel, *densestream.encode(indices, values, gap))

    @classmethod
    def whole(cls, dense: Floats) -> Stream:
        """All elements of a vector as one block."""
        blocks = min(dense.size, 1)
        starts, lengths = (
            arrays.move_like(np.full(blocks, value, np.uint32), dense) for value in (0, dense.size)
        )
        return cls(dense.size, starts, lengths, dense)

    @classmethod
    def pairs(cls, tensor: SparseTensor) -> Stream:
        """Every element a block of its own, for the key-value form."""
        ones = np.ones(tensor.indices.size, np.uint32)
        return cls(tensor.numel, np.ascontiguousarray(tensor.indices), ones, np.ascontiguousarray(tensor.values))

    def merge(self, other: Stream, gap: int) -> Stream:
        """The sum of two streams of one vector, which have blocks of the same ``gap``."""
        if not other.starts.size:
            return self
        if not self.starts.size:
            return other
        ours, theirs = (self.starts, self.lengths, self.values), (other.starts, other.lengths, other.values)
        return Stream(self.numel, *densestream.merge(ours, theirs, gap))

    def split(self, cuts: np.ndarray[Any, np.dtype[np.uint64]]) -> list[Stream]:
        """The ``cuts.size + 1`` parts before, between and behind the sorted ``cuts``; the values are not copied."""
        starts, lengths, block_at, value_at = densestream.split(self.starts, self.lengths, cuts)
        b, v = block_at.tolist(), value_at.tolist()
        return [
            Stream(self.numel, starts[b[p] : b[p + 1]], lengths[b[p] : b[p + 1]], self.values[v[p] : v[p + 1]])
            for p in range(cuts.size + 1)
        ]

    @staticmethod
    def join(parts: list[Stream]) -> Stream:
        """Streams of one vector, each wholly before the next, as one."""
        if len(parts) == 1:
            return parts[0]
        return Stream(
            parts[0].numel,
            np.concatenate([part.starts for part in parts]),
            np.concatenate([part.lengths for part in parts]),
            np.concatenate([part.values for part in parts]),
        )

    def indices(self) -> U32:
        """Of all elements that the blocks cover."""
        if self.values.size == self.starts.size:
            return self.starts
        return densestream.indices(self.starts, self.lengths, self.values.size)

    def sparse(self) -> SparseTensor:
        """The elements that are not zero."""
        return SparseTensor(self.numel, *densestream.nonzero(self.starts, self.lengths, self.values))

    def dense(self, begin: int, out: Floats) -> None:
        """Writes all elements from ``begin`` on that ``out`` has room for; no block may lie elsewhere."""
        densestream.to_dense(self.starts, self.lengths, self.values, begin, out)


def covered(indices: U32, numel: int, gap: int) -> U32:
    """All elements inside the blocks of these indices: with ``fill``, what to send at no more cost than the indices."""
    nothing = arrays.zeros(indices.size, np.float32, indices)
    starts, lengths, values = densestream.encode(indices, nothing, gap)
    return indices if values.size == indices.size else densestream.indices(starts, lengths, values.size)


def value_codec(value: ValueName, bits: int) -> ValueCodec:
    """The codec of a stream's values on the wire."""
    if value == "qsgd":
        return QSGD(bits=bits)
    return Raw() if value == "raw" else Half(dtype=value)


def pack(
    stream: Stream, form: int, codec: ValueCodec | None = None, key: Key | None = None, begin: int = 0, end: int = 0
) -> U8:
    """A stream's bytes, a multiple of 8.

    Layout: ``| form u8 | dtype u8 | value codec u8 | 0 | numel u32 | blocks u32 | count u32 | a bytes u64 |
    b bytes u64 | values bytes u64 | a | b | values |``; a, b and values are each padded with zeros to 8 bytes.
    ``count`` is the number of values. By the form:

    - 0, blocks: a is the starts and b the lengths, uint32.
    - 1, coded blocks: a and b are rice sections (kernels/rice/rice.cpp). Element i of a has for its gap the number of
      elements between block i - 1 (or ``begin``) and block i, element i of b has length_i - 1.
    - 2, pairs (the key-value format): every block has one element; a is the indices, uint32, and b is empty.

    Args:
        codec: of the values; None: raw. Values that are not all finite are always raw.
        begin, end: the blocks lie inside; coded blocks only. ``end`` 0: the whole vector.
    """
    if codec is None or (codec.id != Raw.id and not deferred.finite(stream.values)):
        codec = Raw()
    a: U8
    b: U8
    starts = stream.starts
    if form == CODED and starts.size:
        skips, ends = densestream.gaps(starts, stream.lengths, begin)
        a = rice.encode(skips, (end or stream.numel) - begin)
        b = rice.encode(ends, stream.values.size)
    elif form == PAIRS:
        starts = stream.indices()
        a, b = starts.view(np.uint8), starts[:0].view(np.uint8)
    else:
        a, b = starts.view(np.uint8), stream.lengths.view(np.uint8)
    values, _ = codec.encode(stream.values, None, key or Key(0, 0, 0))
    sizes = (a.size, b.size, values.size)
    counts = (stream.numel, starts.size, stream.values.size)
    header = HEADER.pack(form, DTYPE_IDS[stream.values.dtype], codec.id, *counts, *sizes)
    out: U8 = sections.join(header, a, b, values, pad=8)
    return out


def size_of(data: U8) -> int:
    """Bytes of the stream at the start of ``data``, which may go on behind it."""
    if data.size < HEADER.size:
        raise ValueError(f"a stream begins with {HEADER.size} bytes, and {data.size} are there")
    size = HEADER.size + sum(map(padded, HEADER.unpack(sections.peek(data, HEADER.size))[-3:]))
    if size > data.size:
        raise ValueError(f"a stream's header says {size} bytes, and {data.size} are there")
    return size


def unpack(
    section: U8, numel: int, dtype: np.dtype[Any], key: Key | None = None, begin: int = 0, end: int | None = None
) -> Stream:
    """The stream of ``pack``, all of ``section``.

    Args:
        numel, dtype: of the vector that it must be of.
        begin, end: where its blocks must lie; None: up to ``numel``.

    Raises:
        ValueError: for bytes that are not such a stream.
    """
    if size_of(section) != section.size:
        raise ValueError(f"{section.size - size_of(section)} bytes stand behind the stream")
    form, dtype_id, value_id, length, blocks, count, *sizes = HEADER.unpack(sections.peek(section, HEADER.size))
    end = numel if end is None else end
    if length != numel:
        raise ValueError(f"it is of a vector of {length} elements, and this one has {numel}")
    if form > PAIRS or value_id not in (Raw.id, Half.id, QSGD.id):
        raise ValueError(f"no stream has form {form} and value codec {value_id}")
    if DTYPES.get(dtype_id) != dtype:
        raise ValueError(f"its values are of dtype {dtype_id}, and {DTYPE_IDS[dtype]} ({dtype}) is needed")
    if not blocks <= count <= end - begin:
        raise ValueError(f"it has {blocks} blocks of {count} values for {end - begin} elements")
    parts, at = [], HEADER.size
    for size in sizes:
        parts.append(section[at : at + size])
        at += padded(size)
    a, b, values = parts
    if form != CODED and (a.size, b.size) != (4 * blocks, 4 * blocks if form == PLAIN else 0):
        raise ValueError(f"{blocks} blocks do not take {a.size} and {b.size} bytes")
    # The values first: a section too short for its count is found before arrays of that size are made.
    codec = value_codecs.by_id[value_id]
    decoded: Floats = codec.decode(values, count, None, dtype, key or Key(0, 0, 0))  # type: ignore[attr-defined]
    if form == CODED and blocks:
        starts = rice.decode(a, end - begin, blocks)
        lengths = rice.decode(b, count, blocks)
        densestream.blocks_of_gaps(starts, lengths, begin)
    else:
        starts = a.view(np.uint32)
        lengths = arrays.move_like(np.ones(blocks, np.uint32), a) if form == PAIRS else b.view(np.uint32)
    densestream.check_blocks(starts, lengths, begin, end, count)
    return Stream(numel, starts, lengths, decoded.astype(dtype, copy=False))


@joint_codecs.register
class DenseStream(JointCodec):
    """Neighbours share one start and one length.

    Plain: a block costs 64 bits and each element inside, zeros too, ``32`` (float64: 64); a block may hold up to
    ceil(2 ceil(log2 N / 8) / K) zeros in a row, of K bytes each. For blocks of one element that is 96 bits a kept
    element, 1.5 times the key-value format; for long blocks it tends to half of it.

    Coded (ours): gaps between blocks and lengths in rice code, about 9 bits a block at a density of 1%, and only as
    many zeros inside a block as cost no more than another block.

    Lossless with ``value: raw``. The support is all elements that blocks cover. Layout: ``pack``.

    Attributes:
        coded: rice code for starts and lengths.
        value: ``raw``, or how to shorten the values: ``float16``, ``bfloat16`` or ``qsgd``.
        bits: of a value under ``qsgd``, 2 to 8.
    """

    name = "densestream"
    id = 4
    coded: bool = True
    value: ValueName = "raw"
    bits: int = Field(8, ge=2, le=8)

    def gap(self, numel: int, dtype: np.dtype[Any]) -> int:
        """The most zeros in a row inside a block, of a vector of ``numel`` elements."""
        bits = {"raw": 8 * dtype.itemsize, "qsgd": self.bits}.get(self.value, 16)
        return coded_gap(bits) if self.coded else plain_gap(numel, bits)

    @property
    def form(self) -> int:
        """The number of the layout that ``pack`` is to write."""
        return CODED if self.coded else PLAIN

    def support(self, indices: U32, numel: int, dtype: np.dtype[Any]) -> U32:
        """All elements inside the blocks of these indices: they can be sent at no more cost than the indices alone."""
        return covered(indices, numel, self.gap(numel, dtype))

    def encode(self, indices: U32 | None, values: Floats, numel: int, key: Key) -> tuple[U8, U32 | None]:
        if indices is None:
            stream = Stream.whole(values)
        else:
            stream = Stream.of_pairs(numel, indices, values, self.gap(numel, values.dtype))
        section = pack(stream, self.form, value_codec(self.value, self.bits), key)
        return section, None if indices is None else stream.indices()

    @staticmethod
    def decode(
        section: U8, numel: int, count: int, dense: bool, dtype: np.dtype[Any], key: Key
    ) -> tuple[U32 | None, Floats]:
        stream = unpack(section, numel, dtype, key)
        if stream.values.size != count:
            raise ValueError(f"its blocks hold {stream.values.size} elements, and {count} are wanted")
        deferred.check_finite(stream.values)
        return None if dense else stream.indices(), stream.values
