"""The table of bytes by preset and number of ranks."""

from __future__ import annotations

import pytest
import wire_ratios


def sent(ranks: int, containers: int, reduced: int) -> int:
    return (ranks - 1) * containers + 2 * (ranks - 1) * reduced // ranks


def test_more_ranks_are_computed_from_two_jobs():
    for ranks in (2, 8, 64):
        found = wire_ratios.computed(2, sent(2, 5000, 800), 8, sent(8, 5000, 800), ranks)
        assert found == pytest.approx(sent(ranks, 5000, 800), abs=2)


def test_the_table_relates_bytes_to_the_ring_on_as_many_ranks():
    """With one container of 1% of the gradient, an allgather sends 1% on 2 ranks, and n / 2 times that on n."""
    jobs = {
        ranks: {
            "one": {"sent": sent(ranks, 1000, 0), "dense": sent(ranks, 0, 100_000), "exchange": "allgather"},
            "two": {"sent": 2000, "dense": sent(ranks, 0, 100_000), "exchange": "densestream"},
        }
        for ranks in (2, 4)
    }
    assert wire_ratios.table(jobs, ["one", "two"], [8]).splitlines() == [
        "| preset | exchange | 2 ranks | 4 ranks | 8 ranks |",
        "| --- | --- | --- | --- | --- |",
        "| one | allgather | 1.00% | 2.00% | 4.00% |",
        "| two | densestream | 2.00% | 1.33% |  |",
    ]
