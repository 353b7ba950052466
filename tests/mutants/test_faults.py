"""The planted faults, each of which stands where its text is."""

from __future__ import annotations

from tests.mutants.faults import FAULTS
from tests.mutants.run import ROOT, place


def test_each_planted_fault_has_its_place_and_its_tests():
    """A fault whose text is gone from the package stops run.py in its midst, and those after it are not planted."""
    for _part, old, _new, tests in FAULTS:
        place(ROOT / "hvd_deepreduce", old)
        assert [test for test in tests.split() if not (ROOT / test).is_file()] == []
