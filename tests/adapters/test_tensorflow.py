"""The TensorFlow adapter under real launchers. The cases are the functions of tensorflow_cases.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.adapters.containers import COMPARED
from tests.jobs import Job, each_case
from tests.ranks import ROOT, launch

HERE = Path(__file__).parent
PROGRAM = HERE / "tensorflow_cases.py"
# TensorFlow takes long to start and to trace: fewer launches than for PyTorch, which between them have both libraries,
# two and three ranks, one thread and several. They have much time, on a machine that does other things as well.
THREE = Job(PROGRAM, "mpirun", 3, seconds=1800)
TWO = Job(PROGRAM, "horovodrun --gloo", 2, seconds=1800)
FOUR = Job(PROGRAM, "mpirun", 4, seconds=1800)
# What Keras and a graph make of the adapter depends neither on the launcher nor on the number of ranks. The order of
# many tensors is hardest to keep with three ranks, and the exchanges over MPI need MPI.
ONCE = dict.fromkeys(
    [
        COMPARED,
        "a_capture_records_each_ranks_gradients",
        "buckets_of_several_compressors_in_whatever_order",
        "buckets_of_which_one_needs_the_sum_of_another",
        "indexed_slices_equal_the_pipeline_run_by_hand",
        "larger_scopes_and_other_exchanges_equal_dense",
        "many_tensors_in_buckets",
        "many_tensors_in_whatever_order",
        "operations_in_cpp_equal_those_in_python",
        "momentum_of_dgc_equals_the_oracle_and_resumes",
    ],
    THREE,
) | dict.fromkeys(
    [
        "a_deepreduce_that_is_closed",
        "a_resumed_run_equals_an_unbroken_one",
        "a_step_makes_few_calls_in_python",
        "a_step_with_buckets_that_another_error_ends",
        "every_dtype_and_a_shape_that_is_not_known",
        "gradients_on_a_device_equal_those_on_the_host",
        "gradients_that_nothing_reads",
        "gradients_that_are_none_and_another_choice_of_variables",
        "horovods_callbacks_in_fit",
        "keras_optimizers_and_fit",
        "larger_scopes_in_keras",
        "loss_scaling_skips_the_same_steps_everywhere",
        "mixed_precision_in_keras",
        "operations_in_cpp_reuse_the_memory_of_results_that_are_gone",
        "settings_of_single_tensors",
        "sparse_gradients_in_keras",
        "sparse_gradients_of_several_compressors_in_one_function",
        "stats_are_the_bytes_on_the_wire",
        "two_levels",
        "two_models_in_one_step",
        "what_cannot_be",
        "what_fails_in_buckets_is_raised_at_the_end_of_the_step",
    ],
    TWO,
)


@pytest.mark.launch
@pytest.mark.parametrize(("job", "case"), each_case([THREE, TWO], PROGRAM, once=ONCE))
def test_on_ranks(jobs, job, case):
    jobs.check(job, case)


@pytest.mark.launch
@pytest.mark.parametrize(("job", "case"), each_case([FOUR], PROGRAM, few={FOUR: ["two_levels"]}))
def test_two_nodes_of_two_ranks(jobs, job, case):
    jobs.check(job, case)


@pytest.mark.launch
@pytest.mark.parametrize("exchange", ["allgather", "densestream"])
def test_a_rank_that_dies_ends_the_job(exchange):
    ended = launch("mpirun", 2, HERE / "tensorflow_death.py", exchange, seconds=200, check=False)
    assert ended.returncode != 0, ended.stdout
    assert "step 1 done" in ended.stdout and "step 2 done" not in ended.stdout, ended.stdout


@pytest.mark.launch
def test_a_rank_without_deepreduce_ends_the_job(monkeypatch):
    monkeypatch.setenv("HVD_DEEPREDUCE_HANDSHAKE_SECONDS", "2")
    ended = launch("mpirun", 2, HERE / "tensorflow_mixed.py", seconds=200, check=False)
    assert ended.returncode != 0 and "step done" not in ended.stdout, ended.stdout
    assert "TimeoutError: this rank has waited 2 s at its first gradient" in ended.stdout, ended.stdout


@pytest.mark.slow
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


@pytest.mark.slow
def test_keras_3_is_refused_at_once():
    ended = subprocess.run(
        [sys.executable, "-c", "import hvd_deepreduce.tensorflow"], cwd=ROOT, text=True, timeout=250,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_USE_LEGACY_KERAS": "0"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert ended.returncode == 1
    assert "Install the package tf_keras, and set the environment variable TF_USE_LEGACY_KERAS=1" in ended.stdout
