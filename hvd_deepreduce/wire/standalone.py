"""The container: what one rank sends for one tensor in one step. docs/container.md specifies it to the bit.

This is version 1, which stands alone; a job sends version 2 (frame.py). It is little-endian: a header of 64
bytes, then the index, value and order sections, each padded with zeros to a multiple of 8 bytes::

     0  magic "HVDR"     | version u8 | sparsifier u8 | index u8 | value u8
     8  dtype u8 | flags u8 | 0 u16   | checksum u32
    16  numel u32                     | count u32
    24  seed u32                      | parameter u32
    32  step u32                      | digest u32
    40  index bytes u64
    48  value bytes u64
    56  order bytes u64
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_deepreduce.codecs.interfaces import U8, RngKey, padded
from hvd_deepreduce.codecs.sparse_tensor import DTYPE_IDS, DTYPES, MAX_NUMEL
from hvd_deepreduce.ops import arrays, sections

MAGIC = b"HVDR"
VERSION = 1
HEADER = struct.Struct("<4sBBBBBBHIIIIIIIQQQ")


class ContainerError(ValueError):
    """Bytes that are not a container, or a container of another tensor. Names the sender's rank if it is known.

    Attributes:
        sender: that rank, and what is wrong with its container, for ``named``; None: the text says all.
    """

    sender: tuple[int, object] | None = None


def refusal(rank: int | None, reason: object) -> ContainerError:
    """The error for a container that cannot be read.

    Args:
        rank: the sender; ``None``: unknown.
        reason: the end of the sentence.
    """
    sender = "the container" if rank is None else f"the container of rank {rank}"
    error = ContainerError(f"{sender} cannot be read: {reason}")
    error.sender = None if rank is None else (rank, reason)
    return error


def named(error: ContainerError, ranks: Sequence[int]) -> ContainerError:
    """The error of a group of ranks, with the sender's rank in the job.

    Args:
        error: names the sender by its number in the group, if it names one.
        ranks: of the group, in its order.
    """
    if error.sender is None:
        return error
    number, reason = error.sender
    text = refusal(ranks[number], reason)
    text.sender = None
    return text


@dataclass(frozen=True)
class Container:
    """An unpacked container.

    Attributes:
        sparsifier, index, value: numbers of the codecs. index 0: there is no index section, and the support is the
            sparsifier's shared random selection. sparsifier 0: all ``numel`` elements, in order.
        dtype: float32 or float64, of the compressed tensor.
        numel: elements of that tensor.
        count: elements of the support.
        key: the sender's random key, without its rank.
        digest: of the sender's config.
        indices, values, order: the sections, uint8, without padding.
        joint: ``value`` is the number of a joint codec, and the value section contains the indices too (flag 1).
        ordered: the index section contains raw or packed indices in the order of the decoded values, and there is no
            order section (flag 2).
    """

    sparsifier: int
    index: int
    value: int
    dtype: np.dtype[Any]
    numel: int
    count: int
    key: RngKey
    digest: int
    indices: U8
    values: U8
    order: U8
    joint: bool = False
    ordered: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the packed container."""
        return HEADER.size + sum(padded(section.size) for section in (self.indices, self.values, self.order))


def pack(container: Container) -> U8:
    """The container's bytes, uint8 ``[nbytes]``.

    Raises:
        ContainerError: the tensor has more than 2^32 - 1 elements.
    """
    if container.numel > MAX_NUMEL:
        raise ContainerError(
            f"the tensor has {container.numel} elements, and a container holds at most 2^32 - 1: split the parameter"
        )
    parts = (container.indices, container.values, container.order)
    header = HEADER.pack(
        MAGIC,
        VERSION,
        container.sparsifier,
        container.index,
        container.value,
        DTYPE_IDS[container.dtype],
        container.joint | container.ordered << 1,
        0,
        0,
        container.numel,
        container.count,
        container.key.seed,
        container.key.parameter,
        container.key.step & 0xFFFFFFFF,
        container.digest,
        *(section.size for section in parts),
    )
    return sections.join(header, *parts, pad=8, checked=True)


def unpack(data: U8, rank: int | None = None, numel: int | None = None) -> Container:
    """The container at the start of ``data``. Its sections are views; nothing is copied.

    Args:
        data: uint8, contiguous. Bytes after the container are ignored.
        rank: the sender, for errors.
        numel: the elements that the tensor must have; ``None``: any.

    Raises:
        ContainerError: the bytes are cut or altered, of another format or version, or of another tensor.
    """
    if data.size < HEADER.size:
        raise refusal(rank, f"it has {data.size} bytes, and its header alone has {HEADER.size}")
    magic: bytes
    (magic, version, sparsifier, index, value, dtype, flags, reserved, _, length, count, seed, parameter, step,
     digest, *sizes) = HEADER.unpack(sections.peek(data, HEADER.size))  # fmt: skip
    if magic != MAGIC:
        raise refusal(rank, f"it begins with {magic!r} instead of {MAGIC!r}, so these bytes are not a container")
    if version != VERSION:
        raise refusal(rank, f"it has version {version}, and this release reads {VERSION}: use one release on all ranks")
    total = HEADER.size + sum(padded(size) for size in sizes)
    if total > data.size:
        raise refusal(rank, f"its header announces {total} bytes, and it has {data.size}")
    data = arrays.aligned(data[:total])  # sections are read as whole words
    try:
        sections.check_container(data)
    except ValueError as error:
        raise refusal(rank, error) from None
    if dtype not in DTYPES or flags > 2 or reserved:
        raise refusal(
            rank, f"it has dtype {dtype}, flags {flags} and reserved {reserved}: 1 or 2, 0 to 2, and 0 are allowed"
        )
    if numel is not None and length != numel:
        raise refusal(
            rank, f"its tensor has {length} elements, and this one has {numel}: check that all ranks train one model"
        )
    if count > length:
        raise refusal(rank, f"its support has {count} elements, and its tensor only {length}")
    parts, ends = [], []
    begin = HEADER.size
    for size in sizes:
        parts.append(data[begin : begin + size])
        ends.append(begin + size)
        begin += padded(size)
    try:
        sections.check_padding(data, ends)
    except ValueError as error:
        raise refusal(rank, error) from None
    indices, values, order = parts
    return Container(
        sparsifier, index, value, DTYPES[dtype], length, count, RngKey(seed, parameter, step), digest,
        indices, values, order, joint=flags == 1, ordered=flags == 2,
    )  # fmt: skip


def split(data: U8, ranks: int, numel: int | None = None) -> list[Container]:
    """The containers of an allgather, in rank order.

    Args:
        data: uint8, the containers of all ranks without gaps.
        ranks: how many there must be.
        numel: as in ``unpack``.

    Raises:
        ContainerError: as in ``unpack``, or bytes are left over.
    """
    containers = []
    begin = 0
    for rank in range(ranks):
        containers.append(unpack(data[begin:], rank, numel))
        begin += containers[-1].nbytes
    if begin != data.size:
        raise ContainerError(f"{data.size - begin} bytes follow the containers of all {ranks} ranks")
    return containers
