"""The TensorFlow adapter under real launchers; what is tested stands in tensorflow_cases.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT, launch

HERE = Path(__file__).parent
CASES = HERE / "tensorflow_cases.py"
# TensorFlow takes its time to start: fewer launches than for PyTorch, and everything in each.
WAYS = [("mpirun", 2), ("mpirun", 3), ("horovodrun --gloo", 2)]
# On a machine that does other things as well; alone, a launch takes half a minute.
SECONDS = 900


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize(("launcher", "ranks"), WAYS)
def test_all_cases(launcher, ranks):
    output = launch(launcher, ranks, CASES, seconds=SECONDS).stdout
    expected = CASES.read_text().count("@case\n")
    assert output.count("passed ") + output.count("skipped (") == expected >= 30, output


@pytest.mark.parametrize("exchange", ["allgather", "densestream"])
def test_a_rank_that_dies_ends_the_job(exchange):
    ended = launch("mpirun", 2, HERE / "tensorflow_death.py", exchange, seconds=200, check=False)
    assert ended.returncode != 0, ended.stdout
    assert "step 1 done" in ended.stdout and "step 2 done" not in ended.stdout, ended.stdout


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), **environment}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=250,
    )  # fmt: skip


def test_containers_and_sums_are_those_of_pytorch(tmp_path):
    for framework in ("torch", "tensorflow"):
        launch("mpirun", 2, HERE / "containers.py", framework, str(tmp_path / framework))
    for rank in range(2):
        made = (tmp_path / f"torch.{rank}").read_bytes()
        assert made == (tmp_path / f"tensorflow.{rank}").read_bytes()
        # One for each tensor that is not too small; then of the model, which changes its dtype twice, and of buckets.
        assert made.count(b"48564452") == 3 * (5 + 5 + 3 + 3 + 3 + 4 + 4)


def test_keras_3_is_refused_at_once():
    ended = python("-c", "import hvd_deepreduce.tensorflow", TF_USE_LEGACY_KERAS="0")
    assert ended.returncode == 1
    assert "Install the package tf_keras, and set the environment variable TF_USE_LEGACY_KERAS=1" in ended.stdout
