"""The TensorFlow adapter under real launchers. The cases are the functions of the files ``CASES``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.adapters.containers import COMPARED
from tests.jobs import Job, each_case
from tests.ranks import ROOT, launch
from tests.selection import thorough

HERE = Path(__file__).parent
PROGRAM = HERE / "tensorflow_cases.py"
CASES = [PROGRAM, HERE / "all_cases.py", HERE / "horovod_cases.py"]
# TensorFlow takes long to start and to trace: two ranks run all cases, under Gloo. The order of many tensors is hardest
# to keep with three ranks, and the exchanges over MPI need MPI. The jobs have much time, since the machine is shared.
TWO = Job(PROGRAM, "horovodrun --gloo", 2, seconds=1800)
THREE = Job(PROGRAM, "mpirun", 3, seconds=1800)
# TensorFlow traces for most of their time, and `make test` has others that use the same code.
SLOW = [
    "gradients_on_a_device_equal_those_on_the_host",
    "keras_optimizers_and_fit",
    "two_levels",
    "sparse_gradients_as_dense_and_as_they_are",
    "buckets_of_several_compressors_in_whatever_order",
    "momentum_of_dgc_equals_the_oracle_and_resumes",
    "a_capture_records_each_ranks_gradients",
    "two_models_in_one_step",
    "checkpoints_of_keras_and_states_that_are_wrong",
    "sparse_gradients_in_keras",
    "larger_scopes_in_keras",
    "callbacks_and_measured_residuals",
    "votes_of_scaled_momentum_are_those_of_a_simulation",
    "gradients_that_nothing_reads",
    "gradients_that_are_none_and_another_choice_of_variables",
    "what_fails_in_buckets_is_raised_at_the_end_of_the_step",
    "a_step_with_buckets_that_another_error_ends",
    "buckets_of_which_one_needs_the_sum_of_another",
    "a_deepreduce_that_is_closed",
    "settings_of_single_tensors",
    "horovods_callbacks_in_fit",
    "steps_are_dense_or_compressed_by_choice",
    "loss_scaling_skips_the_same_steps_everywhere",
    "sparse_gradients_of_several_compressors_in_one_function",
    "larger_scopes_with_nan_integers_and_changes",
    "the_state_of_an_elastic_job_restores_and_synchronizes",
    "many_tensors_in_whatever_order",
    "what_cannot_be",
    "an_optimizer_that_loses_under_the_config_is_told_once",
]
# Gloo's process sets and joins are those of test_torch.py.
ONCE = dict.fromkeys(
    [
        COMPARED,
        "scopes_and_exchanges_equal_dense",
        "many_tensors_in_buckets",
        "a_process_set",
        "a_rank_that_joins_early",
    ],
    THREE,
)
FEW = {
    THREE: ["lossy_equals_the_pipeline_run_by_hand", "many_tensors_in_whatever_order",
            "an_error_while_decoding_on_one_rank"],
}  # fmt: skip


@pytest.mark.launch
@pytest.mark.parametrize(
    ("job", "case"),
    each_case(
        [TWO, THREE], *CASES, once=ONCE, few=FEW,
        thorough=[THREE, *SLOW],
    ),
)  # fmt: skip
def test_on_ranks(jobs, job, case):
    jobs.check(job, case)


@pytest.mark.launch
@thorough
def test_a_rank_that_dies_ends_the_job():
    """test_torch.py has that of an exchange over MPI, which is the same code."""
    ended = launch("mpirun", 2, HERE / "tensorflow_death.py", "allgather", seconds=200, check=False)
    assert ended.returncode != 0, ended.stdout
    assert "step 1 done" in ended.stdout and "step 2 done" not in ended.stdout, ended.stdout


@pytest.mark.launch
@thorough
def test_a_rank_without_deepreduce_ends_the_job(monkeypatch):
    monkeypatch.setenv("HVD_DEEPREDUCE_HANDSHAKE_SECONDS", "2")
    ended = launch("mpirun", 2, HERE / "tensorflow_mixed.py", seconds=200, check=False)
    assert ended.returncode != 0 and "step done" not in ended.stdout, ended.stdout
    assert "TimeoutError: this rank has waited 2 s at its first gradient" in ended.stdout, ended.stdout


@thorough
def test_one_rank_alone_finds_mistakes():
    program = """
import horovod.tensorflow as hvd, tensorflow as tf
from hvd_deepreduce.tensorflow import DeepReduce
hvd.init()
variable = tf.Variable(tf.ones([40, 50]))
for compression, op in ((DeepReduce, hvd.Average), (DeepReduce(), hvd.Adasum)):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.sin(variable))
    tape = hvd.DistributedGradientTape(tape, compression=compression, op=op)
    try:
        tape.gradient(loss, [variable])
    except (TypeError, ValueError) as error:
        print(error)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, text=True, timeout=250,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_USE_LEGACY_KERAS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert "compression= was given the class DeepReduce; it must be an instance" in ended.stdout, ended.stdout
    assert "op=hvd.Adasum cannot be computed on compressed gradients" in ended.stdout, ended.stdout


@thorough
def test_keras_3_is_refused_at_once():
    ended = subprocess.run(
        [sys.executable, "-c", "import hvd_deepreduce.tensorflow"], cwd=ROOT, text=True, timeout=250,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_USE_LEGACY_KERAS": "0"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert ended.returncode == 1
    assert "Install the package tf_keras, and set the environment variable TF_USE_LEGACY_KERAS=1" in ended.stdout
