"""The exchanges under mpirun. The cases are the functions of the modules that mpi_cases.py imports."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.jobs import Job, each_case
from tests.ranks import launch

HERE = Path(__file__).parent
# Five ranks run all cases: their number is odd, and more than a power of two. test_simulation.py has every number.
JOBS = {ranks: Job(HERE / "mpi_cases.py", "mpirun", ranks) for ranks in (2, 4, 5, 8)}
pytestmark = pytest.mark.launch


@pytest.mark.parametrize(
    ("job", "case"),
    each_case(list(JOBS.values()), HERE / "sums.py", thorough=[JOBS[n] for n in (2, 4, 8)]),
)
def test_sums(jobs, job, case) -> None:
    jobs.check(job, case)


@pytest.mark.parametrize(
    ("job", "case"),
    each_case([JOBS[2], JOBS[5]], HERE / "queue_cases.py", HERE / "job_cases.py", thorough=[JOBS[2]]),
)
def test_queue(jobs, job, case) -> None:
    jobs.check(job, case)


@pytest.mark.parametrize(
    ("job", "case"),
    each_case([JOBS[2], JOBS[5]], HERE / "faults.py", HERE / "damage.py", HERE / "local_errors.py", thorough=[JOBS[2]]),
)
def test_faults_are_errors_on_all_ranks(jobs, job, case) -> None:
    jobs.check(job, case)


@pytest.mark.parametrize("fault", ["silent", "silent_midway"])
def test_silence_is_an_error(fault: str) -> None:
    done = launch("mpirun", 3, HERE / "faults.py", fault, seconds=60, check=False)
    assert "all faults were found" in done.stdout, done.stdout
    if fault == "silent":
        assert re.search(r"a rank is lost: rank \d had no message from the other ranks for 2 s", done.stdout)
        assert "an earlier exchange over this communicator was aborted" in done.stdout
    else:  # the ranks that wait tell each other, and the one that was late
        for rank in range(3):
            assert re.search(rf"rank {rank}: a rank is lost: rank \d had no message from rank \d", done.stdout)
        assert re.search("rank 0 (had no message from|was waiting for) rank 2", done.stdout), done.stdout


def test_a_killed_rank_ends_the_job() -> None:
    done = launch("mpirun", 4, HERE / "faults.py", "dies", seconds=60, check=False)
    assert done.returncode != 0 and "exited on signal 9" in done.stdout


def test_a_killed_rank_is_named_where_the_launcher_lets_the_others_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_MCA_orte_enable_recovery", "1")
    done = launch("mpirun", 3, HERE / "faults.py", "dies", seconds=60, check=False)
    assert re.search(r"a rank is lost: rank \d had no message from rank .* for 5 s", done.stdout), done.stdout
    assert re.search(r"rank \d (had no message from|was waiting for) rank [01, ]*2", done.stdout), done.stdout


@pytest.mark.thorough
@pytest.mark.timeout(500)
def test_two_horovod_jobs_and_a_process_set_in_one_world() -> None:
    """Five ranks that wait for each other: 20 s on an idle machine, 160 s beside other tests."""
    done = launch("mpirun", 5, HERE / "two_jobs.py", seconds=450)
    assert done.stdout.count("all sums are right") == 5
