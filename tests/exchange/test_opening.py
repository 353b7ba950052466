"""The ranks' cards, without MPI: what is packed is read, and what changes is found."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_deepreduce.exchange.mpi import announcement

SAME = (7, 1, 2, 3, 1000, 4, 2**64 - 1, 1, 2**63)


def test_a_card_has_one_size() -> None:
    assert announcement.CARD_BYTES % 8 == 0
    for length in (1, announcement.room()):
        section = np.arange(length, dtype=np.uint16).astype(np.uint8)
        card = announcement.pack(False, 12, SAME, section)
        assert card.size == announcement.CARD_BYTES
        read = announcement.read(card)
        assert (read.failed, read.kept, read.same) == (False, 12, SAME)
        assert np.array_equal(read.checked(3), section)
    for none in (None, np.zeros(announcement.room() + 1, np.uint8)):
        read = announcement.read(announcement.pack(True, 0, SAME, none))
        assert read.failed and read.section is None
        with pytest.raises(ValueError, match="card of rank 3"):
            read.checked(3)


def test_every_flipped_bit_of_a_section_is_found() -> None:
    card = announcement.pack(False, 12, SAME, np.arange(100, dtype=np.uint8))
    # The section, its hash, and its size.
    for bit in [*range(8 * 16, 8 * 32), *range(8 * announcement.HEADER.size, 8 * (announcement.HEADER.size + 100))]:
        broken = card.copy()
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match="cannot read the tensor on the card of rank 3: its bytes changed"):
            announcement.read(broken).checked(3)


def test_many_ranks_find_the_largest_numbers_in_place_of_cards() -> None:
    def meeting(*said: tuple[bool, int, tuple[int, ...]]) -> list[announcement.Card]:
        return announcement.read_numbers(np.max([announcement.numbers(*one) for one in said], 0))

    same = meeting((False, 12, SAME), (False, 3, SAME))
    assert {card.same for card in same} == {SAME} and max(card.kept for card in same) == 12
    assert not any(card.failed or card.section is not None for card in same)
    for place in range(announcement.NUMBERS):
        other = tuple(one ^ (1 << place) if at == place else one for at, one in enumerate(SAME))
        least, most = (card.same for card in meeting((False, 0, SAME), (False, 0, other)))
        assert least != most
    assert all(card.failed for card in meeting((False, 1, SAME), (True, 0, (0,) * announcement.NUMBERS)))
