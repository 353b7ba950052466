"""LocalSGD under real launchers. The cases are the functions of local_sgd_cases.py, and those of
local_sgd_torch_cases.py or local_sgd_tensorflow_cases.py; and those of local_delay_cases.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import Job, each_case
from tests.selection import thorough

PROGRAM = Path(__file__).parent / "local_sgd_torch_cases.py"
SHARED = Path(__file__).parent / "local_sgd_cases.py"
THREE, GLOO = JOBS = [Job(PROGRAM, "mpirun", 3), Job(PROGRAM, "horovodrun --gloo", 2)]
# Gloo's own ways: the exchanges, and how ranks are told of an error.
FEW = {
    GLOO: [
        "asynchronous_exchanges_equal_the_same_by_hand",
        "other_scopes_exchanges_and_dtypes",
        "a_rank_with_nan_discards_the_period_on_all_ranks",
        "ranks_that_differ_get_an_error",
        "ranks_that_part_get_an_error",
        "an_error_while_decoding_on_one_rank",
    ]
}
DELAYED = Path(__file__).parent / "local_delay_cases.py"
ON_TENSORFLOW = Path(__file__).parent / "local_sgd_tensorflow_cases.py"


@pytest.mark.launch
@pytest.mark.parametrize(("job", "case"), each_case(JOBS, SHARED, PROGRAM, few=FEW, thorough=[GLOO]))
def test_on_ranks(jobs, job, case):
    jobs.check(job, case)


@pytest.mark.launch
@pytest.mark.parametrize(("job", "case"), each_case([Job(DELAYED, "torchrun", 3)], DELAYED))
def test_exchanges_in_flight(jobs, job, case):
    jobs.check(job, case)


@pytest.mark.launch
@thorough
@pytest.mark.parametrize(("job", "case"), each_case([Job(ON_TENSORFLOW, "mpirun", 2)], SHARED, ON_TENSORFLOW))
def test_tensorflow_on_ranks(jobs, job, case):
    jobs.check(job, case)
