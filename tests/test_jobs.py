"""The tests' own organization: cases of launched programs, and markers that are refused where they are missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import jobs as module
from tests import ranks
from tests.case_runner import case_names
from tests.jobs import Job, Jobs

PROGRAM = Path(__file__).with_name("jobs_cases.py")
JOB = Job(PROGRAM, "mpirun", 2)


def failure(jobs: Jobs, case: str) -> str:
    with pytest.raises(pytest.fail.Exception) as failed:
        jobs.check(JOB, case)
    return str(failed.value)


@pytest.mark.launch
def test_every_case_is_reported_with_its_own_outcome(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CASE_SECONDS", 5.0)
    names = case_names(PROGRAM)
    made = Jobs({JOB: names}, tmp_path)
    assert made.check(JOB, "passes") == [{"rank": 0}, {"rank": 1}]
    with pytest.raises(pytest.skip.Exception, match="there is no moon"):
        made.check(JOB, "is_skipped")
    said = failure(made, "is_skipped_on_one_rank")
    assert "rank 0: skipped\nthere is no moon" in said and "rank 1: passed" in said
    said = failure(made, "fails_on_all_ranks")
    assert "ValueError: this is rank 0" in said and "ValueError: this is rank 1" in said
    made.check(JOB, "passes_after_a_failure")
    assert len(list(tmp_path.iterdir())) == 1
    # What an earlier failure may have caused is tried in a new launch.
    said = failure(made, "fails_while_the_others_wait")
    assert "ValueError: nobody tells rank 1" in said and "rank 1: did not end it" in said
    assert "The job ended with status 1." in said and "may be the cause" not in said
    assert len(list(tmp_path.iterdir())) == 2
    (first, _) = made.check(JOB, "passes_in_a_new_launch")
    said = failure(made, "dies")
    assert "The job ended with status 9." in said and "rank 0, 1: did not end it" in said
    said = failure(made, "hangs")
    assert "No rank ended it within 5 s. The job was stopped." in said
    (last, _) = made.check(JOB, "passes_at_the_end")
    assert first != last and made.launch is None
    # Outcomes are kept.
    folders = list(tmp_path.iterdir())
    assert made.check(JOB, "passes") and "status 9" in failure(made, "dies")
    assert list(tmp_path.iterdir()) == folders


@pytest.mark.launch
def test_only_the_selected_cases_are_run(tmp_path):
    made = Jobs({JOB: ["passes", "passes_at_the_end"]}, tmp_path)
    made.check(JOB, "passes_at_the_end")
    made.check(JOB, "passes")
    (folder,) = tmp_path.iterdir()
    assert {path.name.split(".")[0] for path in folder.glob("*.json")} == {"ready", "passes", "passes_at_the_end"}


@pytest.mark.launch
def test_a_job_that_does_not_start_fails_all_its_cases_at_once(tmp_path):
    made = Jobs({JOB: ["passes", "no_such_case"]}, tmp_path)
    for case in ("passes", "no_such_case"):
        said = failure(made, case)
        assert "The job did not start." in said and "there is no case no_such_case" in said
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.launch
def test_a_job_that_takes_too_long_is_stopped(tmp_path):
    job = Job(PROGRAM, "mpirun", 2, seconds=3)
    with pytest.raises(pytest.fail.Exception, match="The job took more than 3 s. It was stopped."):
        Jobs({}, tmp_path).check(job, "hangs")


def test_a_launcher_in_a_test_without_the_marker_is_refused():
    with pytest.raises(pytest.UsageError, match=r"test_jobs.py::.* starts mpirun: mark it with @pytest.mark.launch"):
        ranks.launch("mpirun", 2, PROGRAM)


@pytest.mark.thorough
def test_a_kernel_in_a_test_without_the_marker_is_refused(tmp_path):
    file = tmp_path / "test_unmarked.py"
    test = "def test_unmarked():\n    cuda_emulator.launches += 1\n"
    command = [sys.executable, "-m", "pytest", "-c", ranks.ROOT / "setup.cfg", "-p", "tests.conftest", file]
    for mark, status in (("", 1), ("@pytest.mark.emulator\n", 0)):
        file.write_text(f"import pytest\nfrom tests import cuda_emulator\n{mark}{test}")
        done = subprocess.run(command, cwd=ranks.ROOT, capture_output=True, text=True, timeout=100)
        assert done.returncode == status, done.stdout
        assert ("test_unmarked runs kernels in the emulator: mark it with" in done.stdout) == bool(status)
