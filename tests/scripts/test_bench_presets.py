"""bench_presets.py: rows of a page are kept beside those of a new run."""

from __future__ import annotations

import doc_sections
from bench_presets import DOC, Outcome, kept_rows, table


def test_rows_of_the_page_are_kept_and_new_ones_replace_them():
    found = {"none": {"cnn": Outcome(1, 100, 0.99)}, "small": {"cnn": Outcome(0.0022, 1, 0.98)}}
    first = table(found, {})
    assert kept_rows(first) == {"small": ["0.22%", "+1.00"]}
    other = {"none": found["none"], "fast": {"cnn": Outcome(0.0049, 1, 1.0)}}
    assert list(kept_rows(table(other, kept_rows(first)))) == ["small", "fast"], "the best bytes come first"
    again = {"none": found["none"], "small": {"cnn": Outcome(0.01, 1, 0.99)}}
    assert kept_rows(table(again, kept_rows(first))) == {"small": ["1%", "+0.00"]}


def test_the_rows_that_the_page_has_are_read():
    rows = kept_rows(doc_sections.read(DOC, "gpt, embedding"))
    assert {"smallest", "adamw_small"} <= set(rows) and all(len(cells) == 4 for cells in rows.values())
