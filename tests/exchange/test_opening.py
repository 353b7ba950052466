"""The ranks' cards, without MPI: what is packed is read, and what changes is found."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_deepreduce.exchange import opening

SAME = (7, 1, 2, 3, 1000, 4, 2**64 - 1, 1, 2**63)


@pytest.mark.parametrize("ranks", [1, 2, 5, 32, 33, 600, 5000])
def test_cards_have_a_size_that_depends_on_the_ranks_alone(ranks: int) -> None:
    size = opening.card_bytes(ranks)
    assert size % 8 == 0 and 256 <= size <= 4608 and (size == 4608) == (ranks <= 32)
    assert size == 256 or ranks * size <= 32 * 4608
    for length in (1, opening.room(ranks)):
        section = np.arange(length, dtype=np.uint8)
        card = opening.pack(ranks, False, 12, SAME, section)
        assert card.size == size
        read = opening.read(card)
        assert (read.failed, read.kept, read.same) == (False, 12, SAME)
        assert np.array_equal(read.checked(3), section)
    for none in (None, np.zeros(opening.room(ranks) + 1, np.uint8)):
        read = opening.read(opening.pack(ranks, True, 0, SAME, none))
        assert read.failed and read.section is None
        with pytest.raises(ValueError, match="card of rank 3"):
            read.checked(3)


def test_every_flipped_bit_of_a_section_is_found() -> None:
    card = opening.pack(2, False, 12, SAME, np.arange(100, dtype=np.uint8))
    # The section, its hash, and its size.
    for bit in [*range(8 * 16, 8 * 32), *range(8 * opening.HEADER.size, 8 * (opening.HEADER.size + 100))]:
        broken = card.copy()
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match="cannot read the tensor on the card of rank 3: its bytes changed"):
            opening.read(broken).checked(3)
