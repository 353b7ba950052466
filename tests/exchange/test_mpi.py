"""The exchanges under mpirun. One start of mpirun runs many cases: see the programs that are started."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ranks import launch

HERE = Path(__file__).parent


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7, 8])
def test_sums(ranks: int) -> None:
    done = launch("mpirun", ranks, HERE / "sums.py", seconds=200)
    assert "all sums are right" in done.stdout


@pytest.mark.parametrize("ranks", [2, 5])
def test_queue(ranks: int) -> None:
    done = launch("mpirun", ranks, HERE / "queue_cases.py", seconds=100)
    assert "all queues work" in done.stdout


@pytest.mark.parametrize("ranks", [2, 5])
def test_faults_are_errors_on_all_ranks(ranks: int) -> None:
    done = launch("mpirun", ranks, HERE / "faults.py", "wrong_input", "broken_messages", seconds=100)
    assert "all faults were found" in done.stdout


@pytest.mark.parametrize("fault", ["silent", "silent_midway"])
def test_silence_is_an_error(fault: str) -> None:
    done = launch("mpirun", 3, HERE / "faults.py", fault, seconds=60, check=False)
    assert "all faults were found" in done.stdout and "a rank is lost: no message from" in done.stdout
    if fault == "silent":
        assert "an earlier exchange over this communicator was aborted" in done.stdout
    else:
        assert "rank 0: a rank is lost: no message from rank 2 for 2 s" in done.stdout


def test_a_killed_rank_ends_the_job() -> None:
    done = launch("mpirun", 4, HERE / "faults.py", "dies", seconds=60, check=False)
    assert done.returncode != 0 and "exited on signal 9" in done.stdout


def test_a_killed_rank_is_named_where_the_launcher_lets_the_others_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_MCA_orte_enable_recovery", "1")
    done = launch("mpirun", 3, HERE / "faults.py", "dies", seconds=60, check=False)
    assert re.search(r"rank 0: a rank is lost: no message from rank [01, ]*2 for 5 s", done.stdout), done.stdout
