"""Fewer cases than all combinations. Without pytest: golden files are made with this, too."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def pairs(a: Collection[Any], b: Collection[Any], c: Collection[Any]) -> list[tuple[Any, Any, Any]]:
    """Triples in which every pair of two values occurs: len(a) * len(b) of them; c is not longer than a or b."""
    assert len(c) <= min(len(a), len(b)), "give the shortest last"
    third = list(c)
    return [(one, two, third[(i + j) % len(third)]) for i, one in enumerate(a) for j, two in enumerate(b)]
