"""The bytes that every rank hands in when it comes to an exchange: its card. Needs no MPI.

All ranks get all cards by one small allgather, so all draw the same conclusions from them. A tensor that is small
enough travels on the card: then the exchange has no other message before its agreement. All numbers are little-endian::

    byte   0            8           16            24                  32             40           112
           | failed u64 | kept u64  | size u64    | hash u64          | same [9] u64 ...          | section ... | 0 |

``failed`` is 1 if the rank cannot take part, ``kept`` the number of elements that it keeps, ``same`` what must be the
same on all ranks, ``size`` and ``hash`` those of the section (``ops.hash``); ``size`` is 0 if there is none. A card has
``card_bytes(ranks)`` bytes: 4,608 for up to 32 ranks, and at least 256.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hvd_deepreduce.codec import U8
from hvd_deepreduce.ops.hash import hash64

NUMBERS = 9
"""How many numbers must be the same on all ranks."""
HEADER = struct.Struct(f"<4Q{NUMBERS}Q")
MOST_BYTES, LEAST_BYTES, ALL_BYTES = 4608, 256, 4608 * 32
"""Bounds of the bytes of one card, and of all cards together where that leaves the least."""


class Card(NamedTuple):
    """What one rank says.

    Attributes:
        failed: whether it cannot take part.
        kept: the number of elements that it keeps.
        same: what must be the same on all ranks.
        section: its packed tensor, not yet checked; None: the tensor is too large for a card.
        hash: of the section.
    """

    failed: bool
    kept: int
    same: tuple[int, ...]
    section: U8 | None
    hash: int

    def checked(self, rank: int) -> U8:
        """The section, whose bytes are those that the rank handed in.

        Raises:
            ValueError: they changed on the way, or there is none.
        """
        if self.section is None or hash64(self.section) != self.hash:
            raise ValueError(f"cannot read the tensor on the card of rank {rank}: its bytes changed on the way")
        return self.section


def card_bytes(ranks: int) -> int:
    """The bytes of a card, the same on all ranks, a multiple of 8."""
    return max(LEAST_BYTES, min(MOST_BYTES, ALL_BYTES // ranks & ~7))


def room(ranks: int) -> int:
    """The most bytes of a section on a card."""
    return card_bytes(ranks) - HEADER.size


def pack(ranks: int, failed: bool, kept: int, same: Sequence[int], section: U8 | None) -> U8:
    """A card, uint8 ``[card_bytes(ranks)]``.

    Args:
        section: the packed tensor, at least one byte; None, or one that has more than ``room`` bytes, stays off it.
    """
    card = np.zeros(card_bytes(ranks), np.uint8)
    if section is None or section.size > room(ranks):
        section = card[:0]
    HEADER.pack_into(card.data, 0, failed, kept, section.size, hash64(section), *same)
    card[HEADER.size : HEADER.size + section.size] = section
    return card


def read(card: U8) -> Card:
    """What a card says. Its section is a view."""
    failed, kept, size, its_hash, *same = HEADER.unpack_from(card.data)
    section = card[HEADER.size : HEADER.size + size] if size else None
    return Card(bool(failed), kept, tuple(same), section, its_hash)
