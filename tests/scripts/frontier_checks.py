"""What the tests of both frontiers ask of a run."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
from frontier import signs


def check_a_run(module: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is repeatable, counts its bytes, and is read again while its settings are the same."""

    def sets(every: int) -> None:
        method = module.Method("short", config=signs(0.1), every=every, momentum=0.4)
        monkeypatch.setitem(module.METHODS, "short", method)

    sets(2)
    first, again = (module.train("short", 2, 3, 0) for _ in range(2))
    assert {**first, "seconds": 0} == {**again, "seconds": 0}
    assert 0 < first["share"] < 0.03
    path = folder / "runs.jsonl"
    path.write_text(json.dumps(first) + "\n")
    assert module.load(path) == [first]
    sets(3)
    assert module.load(path) == [], "a run with other settings counts no more"
