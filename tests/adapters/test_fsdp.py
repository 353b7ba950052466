"""Gradients between the replicas of a sharded model, under torchrun. The cases are the functions of ``PROGRAM``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import Job, each_case

PROGRAM = Path(__file__).parent / "fsdp_cases.py"


@pytest.mark.launch
@pytest.mark.parametrize(("job", "case"), each_case([Job(PROGRAM, "torchrun", 4)], PROGRAM))
def test_on_ranks(jobs, job, case):
    jobs.check(job, case)
