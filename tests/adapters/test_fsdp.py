"""Gradients and local updates between the replicas of a sharded model, under torchrun. The cases are the functions of
``PROGRAM`` and ``LOCAL``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import Job, each_case
from tests.selection import thorough

PROGRAM = Path(__file__).parent / "fsdp_cases.py"
LOCAL = PROGRAM.with_name("fsdp_local_cases.py")
FOUR = Job(PROGRAM, "torchrun", 4)
THOROUGH = [
    "a_resumed_run_equals_an_unbroken_one",
    "a_distributed_checkpoint_resumes_bit_equal_and_on_other_meshes",
    "the_losses_of_a_gpt_are_those_of_ddp",
    "clipping_by_the_norm_of_all_shards",
    "what_fsdp_offers",
    "tensor_parallelism_within_a_replica",
    "frozen_modules_are_left_alone",
    "states_of_another_number_of_replicas",
    "a_rank_that_does_not_come",
    "the_exchange_runs_during_the_backward_pass",
    "each_replica_trains_by_itself_after_close",
    "modes_and_optimizers",
    "stats_are_the_bytes_on_the_wire",
]


@pytest.mark.launch
@pytest.mark.parametrize(("job", "case"), each_case([FOUR], PROGRAM, thorough=THOROUGH))
def test_on_ranks(jobs, job, case):
    jobs.check(job, case)


@pytest.mark.launch
@thorough
@pytest.mark.parametrize(("job", "case"), each_case([Job(LOCAL, "torchrun", 4)], LOCAL))
def test_local_updates_on_ranks(jobs, job, case):
    """`make test` has LocalSGD on whole models (test_local_sgd.py), and the gradients of sharded ones, above."""
    jobs.check(job, case)
