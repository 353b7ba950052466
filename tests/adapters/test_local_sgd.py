"""LocalSGD under real launchers. The cases are the functions of local_sgd_cases.py, and on TensorFlow those of
local_sgd_tensorflow_cases.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import Job, each_case

PROGRAM = Path(__file__).parent / "local_sgd_cases.py"
JOBS = [Job(PROGRAM, "mpirun", 3), Job(PROGRAM, "horovodrun --gloo", 2)]
ON_TENSORFLOW = Path(__file__).parent / "local_sgd_tensorflow_cases.py"


@pytest.mark.launch
@pytest.mark.parametrize(("job", "case"), each_case(JOBS, PROGRAM))
def test_on_ranks(jobs, job, case):
    jobs.check(job, case)


@pytest.mark.launch
@pytest.mark.parametrize(("job", "case"), each_case([Job(ON_TENSORFLOW, "mpirun", 2)], ON_TENSORFLOW))
def test_tensorflow_on_ranks(jobs, job, case):
    jobs.check(job, case)
