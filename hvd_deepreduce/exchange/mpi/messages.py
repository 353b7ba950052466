"""The bytes of a message between two ranks: a header, and the sections that it carries. Needs no MPI.

A section is one packed stream (``joint.stream_format``). All numbers are little-endian::

    byte   0            8            16             24         28           32         36
           | hash u64   | size u64   | sequence u64 | step u32 | bucket u32 | from u32 | tag u32 | sections ... |

``hash`` is that of all bytes after it (``ops.hash``), ``size`` the number of bytes of the whole message, a multiple of
8. ``sequence``, ``step`` and ``bucket`` say which exchange the message belongs to, ``from`` is the sender's rank, and
``tag`` says which message of that exchange it is. A rank that has failed sends headers without sections.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from hvd_deepreduce.codecs.interfaces import U8
from hvd_deepreduce.codecs.joint.stream_format import ROOM, packed_size
from hvd_deepreduce.ops import sections as rows
from hvd_deepreduce.ops.hash import hash64
from hvd_deepreduce.ops.library import address

HEADER = struct.Struct("<QQQIIII")
assert HEADER.size == ROOM
HASH = struct.Struct("<Q")
SECTION_BYTES, ELEMENT_BYTES = 1024, 17
"""The most bytes of a section, and of each element that it may cover: a plain block of one float64 takes 16."""


class Label(NamedTuple):
    """Which exchange a message belongs to.

    Attributes:
        sequence: the number of the exchange on its communicator, counted by every rank.
        step, bucket: whose gradients are summed.
    """

    sequence: int
    step: int
    bucket: int

    def __str__(self) -> str:
        return f"exchange {self.sequence} (bucket {self.bucket} of step {self.step})"


def largest(sections: int, elements: int) -> int:
    """The most bytes of a message of so many sections, which together cover at most ``elements`` elements."""
    return HEADER.size + SECTION_BYTES * sections + ELEMENT_BYTES * elements


def pack(label: Label, sender: int, tag: int, sections: list[U8]) -> U8:
    """A message, uint8.

    Args:
        sections: of which each has a multiple of 8 bytes; none: the sender has failed. A single one that has ``ROOM``
            in memory before it, as those of ``stream_format.pack`` have, is not copied: the header is written there. It
            may be sent to several ranks, with one tag.
    """
    size = HEADER.size + sum(section.size for section in sections)
    header = HEADER.pack(0, size, label.sequence, label.step, label.bucket, sender, tag)
    message = _around(sections[0]) if len(sections) == 1 else None
    if message is None:
        message = rows.join(header, *sections, pad=8)
    else:
        # Sent to a second rank, these bytes stay what they are: MPI may be reading them for the first.
        message.data[HASH.size : HEADER.size] = header[HASH.size :]
    HASH.pack_into(message.data, 0, hash64(message[HASH.size :]))
    return message


def _around(section: U8) -> U8 | None:
    """A section and the room before it, if it has any."""
    base = section.base
    if not isinstance(base, np.ndarray) or base.dtype != np.uint8 or base.ndim != 1 or not base.flags.writeable:
        return None
    return base[: ROOM + section.size] if address(section) - address(base) == ROOM else None


def size_of(start: U8) -> int:
    """The size that a message's first bytes announce; 0 if they are too few."""
    return int(HEADER.unpack_from(start.data)[1]) if start.size >= HEADER.size else 0


def is_stale(message: U8, label: Label) -> bool:
    """Whether an undamaged message belongs to an earlier exchange: it was sent twice, or given up by its receiver."""
    if message.size < HEADER.size or HEADER.unpack_from(message.data)[2] >= label.sequence:
        return False
    return bool(HASH.unpack_from(message.data)[0] == hash64(message[HASH.size :]))


def unpack(message: U8, label: Label, sender: int, tag: int, count: int) -> list[U8] | None:
    """The sections of a message, as views; None: its sender has failed. Trusts nothing in it.

    Args:
        label: of this rank's exchange.
        sender, tag: those that the message was received with.
        count: the number of sections that it must have.

    Raises:
        ValueError: it is damaged, or another message than the expected one; the text names the sender.
    """
    try:
        return _unpack(message, label, sender, tag, count)
    except ValueError as error:
        raise ValueError(f"cannot read a message of rank {sender}: {error}") from None


def _unpack(message: U8, label: Label, sender: int, tag: int, count: int) -> list[U8] | None:
    if message.size < HEADER.size or message.size % 8:
        raise ValueError(f"it has {message.size} bytes; a multiple of 8, and at least {HEADER.size}, is required")
    found, size, sequence, step, bucket, source, its_tag = HEADER.unpack_from(message.data)
    if found != hash64(message[HASH.size :]):
        raise ValueError("its bytes changed on the way: they do not have the hash that its header gives")
    if size != message.size or (source, its_tag) != (sender, tag):
        raise ValueError(
            f"its header says {size} bytes, rank {source} and tag {its_tag}, and it came with {message.size} bytes, "
            f"rank {sender} and tag {tag}"
        )
    its_label = Label(sequence, step, bucket)
    if its_label != label:
        raise ValueError(f"it belongs to {its_label}, and this is {label}")
    rest = message[HEADER.size :]
    if not rest.size:
        return None
    sections = []
    for _ in range(count):
        end = packed_size(rest)
        sections.append(rest[:end])
        rest = rest[end:]
    if rest.size:
        raise ValueError(f"it has {rest.size} bytes after its {count} streams, where none are allowed")
    return sections
