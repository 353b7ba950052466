"""Version 2 of the container: what a rank sends in a job, where the receiver knows almost all of version 1's header.

The handshake has found the config to be the same on all ranks, and a receiver waits for one tensor at one step. What it
knows is not sent; the checksum covers it, so that another tensor's container is refused. docs/container.md specifies
the bytes::

    | checksum u32 | form u8 | count | index bytes | value bytes | index section | value section | order section |

The three numbers are varints, and each is there only if the form says so.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hvd_deepreduce.codecs.interfaces import U8, RngKey
from hvd_deepreduce.codecs.sparse_tensor import DTYPE_IDS
from hvd_deepreduce.codecs.value.raw import Raw
from hvd_deepreduce.ops import arrays, sections
from hvd_deepreduce.ops.sections import NUMBER_BYTES, read_varint, varint
from hvd_deepreduce.wire.standalone import Container, refusal

FIXED = struct.Struct("<IB")
HEADER_BYTES = FIXED.size + 3 * NUMBER_BYTES
"""The most bytes of a header."""
ORDERED = 15
"""The form's low four bits: raw or packed indices in the order of the values."""
ORDER, SPARSE, UNCOMPRESSED = 16, 32, 64
"""Bits of the form: there is an order section; not all elements are sent; all elements are sent as they are."""
MAX_CHOICES = ORDERED - 1
"""The most index codecs of a config."""
_IMPLIED = struct.Struct("<6I")


@dataclass(frozen=True)
class Shared:
    """What the containers of one tensor have in common, known to all ranks from the handshake.

    Attributes:
        digest: of the job's config.
        sparsifier, value: numbers of the codecs.
        indices: numbers of the index codecs that a container may have; at most ``MAX_CHOICES``.
        joint: whether ``value`` is the number of a joint codec.
        sorts: whether there may be an order section.
        ordered: number of the index codec whose indices may be in the order of the values; 0: they never are.
    """

    digest: int
    sparsifier: int
    indices: tuple[int, ...]
    value: int
    joint: bool
    sorts: bool = False
    ordered: int = 0


class Expected(NamedTuple):
    """The tensor that a container must be of.

    Attributes:
        shared: of its config.
        numel, dtype: its size.
        key: its parameter and step.
    """

    shared: Shared
    numel: int
    dtype: np.dtype[Any]
    key: RngKey


def salt(digest: int, numel: int, dtype: np.dtype[Any], key: RngKey) -> int:
    """What is added to the checksum for what a container does not say."""
    implied = digest, key.seed, key.parameter, key.step & 0xFFFFFFFF, numel, DTYPE_IDS[dtype]
    return zlib.crc32(_IMPLIED.pack(*implied))


def _header(container: Container, shared: Shared) -> bytes:
    """The header, with 0 for the checksum."""
    numbers: list[int] = []
    form = 0
    if container.sparsifier or container.joint or container.value != Raw.id or container.order.size:
        if container.sparsifier:
            form |= SPARSE
            numbers.append(container.count)
        if container.index:
            form |= ORDERED if container.ordered else 1 + shared.indices.index(container.index)
            numbers.append(container.indices.size)
        if container.order.size:
            form |= ORDER
        numbers.append(container.values.size)
    else:
        form = UNCOMPRESSED
    return FIXED.pack(0, form) + b"".join(map(varint, numbers))


def size(container: Container, shared: Shared) -> int:
    """The bytes of ``pack``."""
    sections_of = container.indices, container.values, container.order
    return len(_header(container, shared)) + sum(section.size for section in sections_of)


def pack(container: Container, shared: Shared) -> U8:
    """The container's bytes, uint8.

    Args:
        container: of codecs in ``shared``, or one of all elements with raw values. It has a digest.
    """
    return sections.join(
        _header(container, shared),
        container.indices,
        container.values,
        container.order,
        checked=True,
        at=0,
        salt=salt(container.digest, container.numel, container.dtype, container.key),
    )


def unpack(data: U8, expected: Expected, rank: int | None = None) -> tuple[Container, int]:
    """The container at the start of ``data``, and its number of bytes.

    Its sections are views, or copies where a view would not begin at a multiple of 8 bytes in memory.

    Args:
        data: uint8, contiguous. Bytes after the container are ignored.
        expected: the tensor that the container must be of.
        rank: the sender, for errors.

    Raises:
        ContainerError: the bytes are cut or altered, or are a container of another tensor, step or config.
    """
    try:
        layout = _layout(data, expected)
        return _checked(data, expected, layout), layout.ends[-1]
    except ValueError as error:
        raise refusal(rank, error) from None


@dataclass(frozen=True)
class _Layout:
    """What a container's header says.

    Attributes:
        sparse, uncompressed, ordered: of its form.
        count: of its support.
        index: number of its index codec.
        ends: where its header and its sections end in the data.
    """

    sparse: bool
    uncompressed: bool
    ordered: bool
    count: int
    index: int
    ends: tuple[int, int, int, int]


def _layout(everything: U8, expected: Expected, start: int = 0) -> _Layout:
    """That of the container that begins at byte ``start``.

    Raises:
        ValueError: its header is not one that this job's config gives.
    """
    shared, numel, dtype, _ = expected
    data = everything[start:] if start else everything
    if data.size < FIXED.size:
        raise ValueError(f"it has {data.size} bytes, and its header alone has {FIXED.size} or more")
    header = sections.peek(data, HEADER_BYTES)
    _, form = FIXED.unpack_from(header)
    begin, count, index_bytes, index = FIXED.size, numel, 0, 0
    uncompressed, sparse, ordered = form == UNCOMPRESSED, bool(form & SPARSE), form & 15 == ORDERED
    if ordered:
        index = shared.ordered
    elif form & 15:
        index = shared.indices[(form & 15) - 1] if form & 15 <= len(shared.indices) else -1
    if not uncompressed and (
        form >= UNCOMPRESSED
        or index < 0
        or (index and not sparse)
        or (sparse and not index and shared.indices)
        or (form & ORDER and (ordered or not shared.sorts))
        or (ordered and not index)
        or (shared.joint and form & ~SPARSE)
    ):
        raise ValueError(f"it has the form {form}, which this job's config cannot give: use one config on all ranks")
    if sparse:
        count, begin = read_varint(header, begin)
        if count > numel:
            raise ValueError(f"its support has {count} elements, and its tensor only {numel}")
    if index:
        index_bytes, begin = read_varint(header, begin)
    value_bytes = numel * dtype.itemsize
    if not uncompressed:
        value_bytes, begin = read_varint(header, begin)
    order_bytes = (count * (count - 1).bit_length() + 7) // 8 if form & ORDER and count else 0
    if form & ORDER and not order_bytes:
        raise ValueError(f"it announces an order of {count} values, which takes no bytes")
    ends = (begin, begin + index_bytes, begin + index_bytes + value_bytes)
    total = ends[-1] + order_bytes
    if total > data.size:
        raise ValueError(f"its header announces {total} bytes, and it has {data.size}")
    begin, end, last = (start + end for end in ends)
    return _Layout(sparse, uncompressed, ordered, count, index, (begin, end, last, start + total))


def _checked(data: U8, expected: Expected, layout: _Layout) -> Container:
    """The container, after its checksum is checked."""
    shared, numel, dtype, key = expected
    *ends, total = layout.ends
    try:
        sections.check_container(data[:total], 0, salt(shared.digest, numel, dtype, key))
    except ValueError:
        raise ValueError(not_of(key)) from None
    parts = [arrays.aligned(data[at:end]) for at, end in zip(ends, [*ends[1:], total], strict=True)]
    return _container(expected, layout, parts)


def not_of(key: RngKey) -> str:
    """What is wrong with a container that has another checksum."""
    # Without the key's number of the parameter: under reduce_scatter it is a hash, and of a bucket that of its first.
    return (
        f"its checksum is not that of a container of this tensor at step {key.step} with this rank's config: it was "
        "altered on the way, or is of another tensor, step or config. Check that all ranks run the same steps of one "
        "model"
    )


def _container(expected: Expected, layout: _Layout, parts: Sequence[U8]) -> Container:
    shared, numel, dtype, key = expected
    indices, values, order = parts
    return Container(
        shared.sparsifier if layout.sparse else 0, layout.index, Raw.id if layout.uncompressed else shared.value, dtype,
        numel, layout.count, RngKey(key.seed, key.parameter, key.step & 0xFFFFFFFF), shared.digest, indices, values,
        order, joint=shared.joint and not layout.uncompressed, ordered=layout.ordered,
    )  # fmt: skip


def split(data: U8, ranks: int, tensors: Sequence[Expected]) -> list[list[Container]]:
    """The containers of an allgather: those of each tensor, in rank order.

    Args:
        data: uint8, the containers of the first rank's tensors, then those of the next rank's, and so on, without gaps.
        ranks: how many there must be.
        tensors: those of which every rank has sent a container, in this order, all of one dtype.

    Raises:
        ContainerError: as in ``unpack``, or bytes are left over.
    """
    sections.prefetch_short_headers(data, ranks, [one.numel for one in tensors], tensors[0].dtype.itemsize)
    if sections.at_once(data):
        return _split_at_once(data, ranks, tensors)
    containers: list[list[Container]] = [[] for _ in tensors]
    begin = 0
    for rank in range(ranks):
        for of_tensor, expected in zip(containers, tensors, strict=True):
            container, size = unpack(data[begin:], expected, rank)
            of_tensor.append(container)
            begin += size
    _check_end(data, begin, ranks)
    return containers


def _split_at_once(data: U8, ranks: int, tensors: Sequence[Expected]) -> list[list[Container]]:
    """As ``split``; all checksums are checked together, when that is no longer deferred."""
    layouts: list[_Layout] = []
    parts: list[sections.Parts] = []
    begin = 0
    for rank in range(ranks):
        for expected in tensors:
            try:
                layout = _layout(data, expected, begin)
            except ValueError as error:
                raise refusal(rank, error) from None
            shared, numel, dtype, key = expected
            layouts.append(layout)
            parts.append(sections.Parts(begin, layout.ends, salt(shared.digest, numel, dtype, key)))
            begin = layout.ends[-1]
    _check_end(data, begin, ranks)
    containers: list[list[Container]] = [[] for _ in tensors]
    for number, (layout, of_one) in enumerate(zip(layouts, sections.take_apart(data, parts), strict=True)):
        place = number % len(tensors)
        containers[place].append(_container(tensors[place], layout, of_one))
    return containers


def _check_end(data: U8, end: int, ranks: int) -> None:
    if end != data.size:
        raise refusal(ranks - 1, f"{data.size - end} bytes follow it, which is the last")
