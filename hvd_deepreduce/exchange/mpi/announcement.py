"""The bytes that every rank hands in when it comes to an exchange: its card. Needs no MPI.

All ranks get all cards by one small allgather, so all draw the same conclusions from them. A tensor that is small
enough travels on the card: then the exchange has no other message before its agreement. All numbers are little-endian::

    byte   0            8           16            24                  32             40           112
           | failed u64 | kept u64  | size u64    | hash u64          | same [9] u64 ...          | section ... | 0 |

``failed`` is 1 if the rank cannot take part, ``kept`` the number of elements that it keeps, ``same`` what must be the
same on all ranks, ``size`` and ``hash`` those of the section (``ops.hash``); ``size`` is 0 if there is none. A card has
``CARD_BYTES`` bytes. They do not depend on the tensor, since the ranks have not yet found out whether theirs are of one
size. Larger cards would cost vectors of some thousand elements more than compression saves.

More than ``MOST_CARDS`` ranks do not read a card of each: they find the largest of each number, by one small allreduce
(``numbers``, ``read_numbers``), and no tensor travels there.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hvd_deepreduce.codecs.interfaces import U8
from hvd_deepreduce.ops.hash import hash64
from hvd_deepreduce.ops.types import U64

NUMBERS = 9
"""How many numbers must be the same on all ranks."""
HEADER = struct.Struct(f"<4Q{NUMBERS}Q")
CARD_BYTES = 1024
"""The bytes of a card, a multiple of 8."""
MOST_CARDS = 32
"""The most ranks that hand in cards. The cards of more would take more bytes than their compressed sums."""
REDUCED = 2 + 2 * NUMBERS
"""How many numbers there are in place of cards."""
_ALL = 2**64 - 1


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


def room() -> int:
    """The most bytes of a section on a card."""
    return CARD_BYTES - HEADER.size


def pack(failed: bool, kept: int, same: Sequence[int], section: U8 | None) -> U8:
    """A card, uint8 ``[CARD_BYTES]``.

    Args:
        section: the packed tensor, at least one byte; None, or one that has more than ``room`` bytes, stays off it.
    """
    card = np.zeros(CARD_BYTES, np.uint8)
    if section is None or section.size > room():
        section = card[:0]
    HEADER.pack_into(card.data, 0, failed, kept, section.size, hash64(section), *same)
    card[HEADER.size : HEADER.size + section.size] = section
    return card


def read(card: U8) -> Card:
    """What a card says. Its section is a view."""
    failed, kept, size, its_hash, *same = HEADER.unpack_from(card.data)
    section = card[HEADER.size : HEADER.size + size] if size else None
    return Card(bool(failed), kept, tuple(same), section, its_hash)


def numbers(failed: bool, kept: int, same: Sequence[int]) -> U64:
    """What a rank says in place of a card, uint64 ``[REDUCED]``; the ranks find the largest of each number."""
    return np.array([failed, kept, *same, *(one ^ _ALL for one in same)], np.uint64)


def read_numbers(largest: U64) -> list[Card]:
    """What the largest numbers say, as two cards, which have the largest and the smallest of what must be the same."""
    failed, kept, *rest = largest.tolist()
    most, least = tuple(rest[:NUMBERS]), tuple(one ^ _ALL for one in rest[NUMBERS:])
    return [Card(bool(failed), kept, same, None, 0) for same in (most, least)]
