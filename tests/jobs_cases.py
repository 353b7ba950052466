"""A program of cases that end in every way: see test_jobs.py.

mpirun -np 2 python tests/jobs_cases.py [CASE ...]
"""

import os
import time

import pytest

from tests import case_runner
from tests.case_runner import case, run_cases

RANK = int(os.environ["OMPI_COMM_WORLD_RANK"])
SIZE = int(os.environ["OMPI_COMM_WORLD_SIZE"])


@case
def passes():
    return {"rank": RANK}


@case
def is_skipped():
    pytest.skip("there is no moon")


@case
def is_skipped_on_one_rank():
    if RANK == 0:
        pytest.skip("there is no moon")


@case
def fails_on_all_ranks():
    raise ValueError(f"this is rank {RANK}")


@case
def passes_after_a_failure():
    pass


@case
def fails_while_the_others_wait():
    if RANK == 0:
        raise ValueError("nobody tells rank 1")
    time.sleep(100)


@case
def passes_in_a_new_launch():
    return os.getppid()


@case
def dies():
    if RANK == 1:
        os._exit(9)
    time.sleep(100)


@case
def hangs():
    time.sleep(100)


@case
def passes_at_the_end():
    return os.getppid()


if __name__ == "__main__":
    case_runner.GRACE_SECONDS = 1.0
    run_cases(RANK, SIZE)
