"""The container: what one rank sends of one tensor in one step. Specified to the bit in docs/container.md.

Little-endian. A header of 64 bytes, then the index, value and order sections, each padded with zeros to 8 bytes:

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
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_deepreduce.backend import of
from hvd_deepreduce.codec import U8, Key, padded
from hvd_deepreduce.sparse import DTYPE_IDS, DTYPES, MAX_NUMEL

MAGIC = b"HVDR"
VERSION = 1
HEADER = struct.Struct("<4sBBBBBBHIIIIIIIQQQ")


class ContainerError(ValueError):
    """Bytes that are not a container, or not one that fits the tensor they came for. Names the rank where known."""


@dataclass(frozen=True)
class Container:
    """An unpacked container.

    Attributes:
        sparsifier, index, value: codec numbers. index 0: no index section, the support is the sparsifier's keyed
            choice; sparsifier 0: all ``numel`` elements, in order.
        joint: ``value`` is the number of a joint codec, and the value section holds the indices too (flag 1).
        ordered: the index section holds the indices in the order of the decoded values, in packed fields; there is no
            order section (flag 2).
        dtype: float32 or float64, of the tensor that was compressed.
        numel: elements of that tensor.
        count: elements of the support.
        key: (seed, parameter, step) of the sender's random choices.
        digest: of the sender's config.
        indices, values, order: the sections, uint8, without padding.
    """

    sparsifier: int
    index: int
    value: int
    dtype: np.dtype[Any]
    numel: int
    count: int
    key: Key
    digest: int
    indices: U8
    values: U8
    order: U8
    joint: bool = False
    ordered: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the whole container."""
        return HEADER.size + sum(padded(section.size) for section in (self.indices, self.values, self.order))


def pack(container: Container) -> U8:
    """The container's bytes, uint8 ``[nbytes]``.

    Raises:
        ContainerError: for a tensor of more than 2^32 - 1 elements.
    """
    if container.numel > MAX_NUMEL:
        raise ContainerError(
            f"a container holds up to 2^32 - 1 elements and this tensor has {container.numel}: split the parameter"
        )
    sections = (container.indices, container.values, container.order)
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
        *(section.size for section in sections),
    )
    out: U8 = of(container.values).joined(header, *sections, pad=8, checked=True)
    return out


def unpack(data: U8, rank: int | None = None, numel: int | None = None) -> Container:
    """The container at the start of ``data``, which may go on behind it; its sections are views, nothing is copied.

    Args:
        data: uint8, contiguous.
        rank: who sent it, for the error.
        numel: how many elements the tensor must have; None: any.

    Raises:
        ContainerError: where the bytes are cut, altered, of another format or version, or of another tensor.
    """

    def refuse(reason: str) -> ContainerError:
        sender = "the container" if rank is None else f"the container of rank {rank}"
        return ContainerError(f"{sender} cannot be read: {reason}")

    if data.size < HEADER.size:
        raise refuse(f"it is cut at {data.size} bytes, within its header of {HEADER.size}")
    magic: bytes
    (magic, version, sparsifier, index, value, dtype, flags, reserved, _, length, count, seed, parameter, step,
     digest, *sizes) = HEADER.unpack(of(data).head(data, HEADER.size))  # fmt: skip
    if magic != MAGIC:
        raise refuse(f"it begins with {magic!r}, not with {MAGIC!r}: these bytes are something else")
    if version != VERSION:
        raise refuse(f"it has version {version}, and this release reads {VERSION}: use one release on all ranks")
    total = HEADER.size + sum(padded(size) for size in sizes)
    if total > data.size:
        raise refuse(f"its header says {total} bytes, and {data.size} are there")
    data = of(data).aligned(data[:total])  # sections are read as whole words
    try:
        of(data).check_container(data)
    except ValueError as error:
        raise refuse(str(error)) from None
    if dtype not in DTYPES or flags > 2 or reserved:
        raise refuse(f"it has dtype {dtype}, flags {flags}, reserved {reserved}: 1 or 2, 0 to 2, and 0 are allowed")
    if numel is not None and length != numel:
        raise refuse(f"it is of a tensor of {length} elements, and this one has {numel}: do all ranks train one model?")
    if count > length:
        raise refuse(f"it keeps {count} of {length} elements")
    sections = []
    at = HEADER.size
    for size in sizes:
        sections.append(data[at : at + size])
        at += padded(size)
    indices, values, order = sections
    return Container(
        sparsifier, index, value, DTYPES[dtype], length, count, Key(seed, parameter, step), digest,
        indices, values, order, joint=flags == 1, ordered=flags == 2,
    )  # fmt: skip


def split(data: NDArray[np.uint8], ranks: int, numel: int | None = None) -> list[Container]:
    """The containers of an allgather, in rank order.

    Raises:
        ContainerError: as ``unpack``, and where bytes are left over.
    """
    of(data).read_heads(data, ranks)
    containers = []
    at = 0
    for rank in range(ranks):
        containers.append(unpack(data[at:], rank, numel))
        at += containers[-1].nbytes
    if at != data.size:
        raise ContainerError(f"{data.size - at} bytes stand behind the containers of all {ranks} ranks")
    return containers
