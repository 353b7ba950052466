"""Which cases `make test` runs. The marker ``thorough`` leaves a case to `make test-all`; these functions give it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

thorough = pytest.mark.thorough
FOLDERS = ("tests/installation/", "tests/scripts/", "tests/soak/")
"""All tests of these folders have the marker (conftest.py)."""
EXAMPLES = int(os.environ.get("HVD_TEST_EXAMPLES", "60"))
"""Hypothesis' examples of a test. Those of `make test` have fewer than the others (Makefile): it takes longer to make
most examples than to look at them."""


def examples(number: int) -> int:
    """The ``max_examples`` of a test that has ``number`` of them where others have 60."""
    return max(1, number * EXAMPLES // 60)


def first(values: Iterable[Any], number: int = 1) -> list[Any]:
    """Values for ``parametrize`` (tuples: several): all but the first ``number`` have the marker."""
    sets = [one if isinstance(one, tuple) else (one,) for one in values]
    return [pytest.param(*one, marks=() if at < number else thorough) for at, one in enumerate(sets)]


def each_third(values: Iterable[tuple[Any, ...]], begin: int = 0) -> list[Any]:
    """As ``first``: all but each third have the marker. Three tests of the same values that begin at 0, 1 and 2 have
    all of them without it."""
    return [pytest.param(*one, marks=thorough if at % 3 != begin else ()) for at, one in enumerate(values)]
