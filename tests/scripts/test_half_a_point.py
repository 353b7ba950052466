"""half_a_point.py: its table of given runs, short runs, and the page has the table of the runs that were made."""

from __future__ import annotations

import doc_sections
import half_a_point
import pytest
from half_a_point import HEADS, Run, neumf, rows, table


def test_losses_are_to_dense_of_the_same_seed():
    runs = [Run("ncf", "none", seed, 0.80 + 0.01 * seed, 1) for seed in range(3)]
    runs += [Run("ncf", "adamw_small", seed, 0.798 + 0.012 * seed, 0.001) for seed in (0, 1)]
    runs += [Run("ncf", "adamw_small", 7, 0.1, 0.001)]  # dense has no such seed
    (row,) = rows(runs)
    assert row == ["ncf", "`adamw_small`", "0.100%", "80.40%", "80.50%", "+0.10 (+0.00 to +0.20)", "2", "yes"]


@pytest.mark.parametrize(
    ("lost", "share", "reached"),
    [(0.004, 0.0025, "yes"), (0.0051, 0.001, "**no**"), (0.0, 0.0026, "**no**"), (-0.01, 0.001, "yes")],
)
def test_the_aim_is_both_accuracy_and_bytes(lost, share, reached):
    (row,) = rows([Run("ncf", "none", 0, 0.5, 1), Run("ncf", "adamw_small", 0, 0.5 - lost, share)])
    assert row[-1] == reached and len(row) == len(HEADS)


def test_short_runs_repeat_and_count_their_bytes():
    dense, again = (neumf("none", 0, 60, 1) for _ in range(2))
    assert dense == again and dense.share == 1 and 0 < dense.result < 1
    small = neumf("adamw_small", 0, 60, 1)
    assert 0 < small.share < 0.01 and small.result != 0
    with pytest.raises(ValueError, match="preset is 'small'; only none and presets with local updates run here"):
        neumf("small", 0, 60, 1)


def test_the_page_has_the_table_of_the_runs():
    section = doc_sections.read(half_a_point.DOC, "half-a-point")
    assert table(HEADS, rows(half_a_point.load(half_a_point.RUNS))) in section
