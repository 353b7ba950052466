"""The examples, by the commands that they show."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import LAUNCHERS, ROOT, launch
from tests.selection import thorough

FOLDER = ROOT / "examples"
ELASTIC = "torch_elastic.py"
LAUNCHED = {
    "torch_mpirun.py": ("mpirun", 2),
    "torch_gloo.py": ("horovodrun --gloo", 2),
    "torch_local_sgd.py": ("mpirun", 2),
    "torch_tensorboard.py": ("mpirun", 2),
    "mpi_allreduce.py": ("mpirun", 4),
    "ddp_torchrun.py": ("torchrun", 2), "fsdp_torchrun.py": ("torchrun", 4),
    "ddp_accelerate.py": ("torchrun", 2),
    **{f"{name}.py": ("torchrun", 4) for name in (
        "fsdp_accelerate", "fsdp_lightning", "fsdp_transformers", "local_sgd_sharded",
    )},
}
COUNTED = {"local_sgd_torchrun.py", "local_sgd_accelerate.py", "local_sgd_lightning.py", "local_sgd_transformers.py"}
"""Examples under torchrun in which nothing but this package may send gradients."""
LIGHTNING = "ddp_lightning.py"
TENSORFLOW = ["tensorflow_tape.py", "keras_fit.py"]
PEERS = {"local_sgd_peers.py": ["python"], "fsdp_peers.py": "torchrun --standalone --nproc-per-node 2".split()}
ALONE = ["numpy_codec.py", *PEERS]


def shown(name: str) -> str:
    """The command in an example's docstring: its only indented line."""
    text = ast.get_docstring(ast.parse((FOLDER / name).read_text("utf-8")), clean=False) or ""
    (line,) = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    return line


def command(launcher: str, ranks: int, name: str) -> str:
    parts = [part.replace("{ranks}", str(ranks)) for part in LAUNCHERS[launcher]]
    if "--no-python" in parts:  # the launcher starts Python itself
        return " ".join([*(part for part in parts if part != "--no-python"), f"examples/{name}"])
    return " ".join([*parts, "python", f"examples/{name}"])


def assert_trained(output: str, times: int = 1) -> None:
    found = re.findall(r"loss (\S+) -> (\S+), sent (\S+)% of the dense bytes", output)
    assert len(found) == times, output
    for first, last, share in found:
        assert float(last) < 0.8 * float(first) and 0 < float(share) < 10, output


def test_every_example_is_run_and_short():
    assert {path.name for path in FOLDER.iterdir() if path.suffix == ".py"} == {
        ELASTIC, LIGHTNING, *LAUNCHED, *COUNTED, *TENSORFLOW, *ALONE
    }  # fmt: skip
    for path in FOLDER.glob("*.py"):
        assert len(path.read_text("utf-8").splitlines()) <= 60, f"{path.name} has more than 60 lines"


def test_numpy():
    assert shown("numpy_codec.py") == "python examples/numpy_codec.py"
    done = subprocess.run(
        [sys.executable, FOLDER / "numpy_codec.py"], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"sent 10000 elements in \d+ bytes, 0\.\d+% of the dense bytes\n", done.stdout), done.stdout


@pytest.mark.launch
@thorough
@pytest.mark.parametrize("name", PEERS)
def test_peers(name, tmp_path):
    launcher = PEERS[name]
    each = " ".join([*launcher, f"examples/{name} $peer"])
    assert shown(name) == f"for peer in 0 1; do {each} & done; wait"
    started = [
        subprocess.Popen(
            [*launcher, FOLDER / name, str(peer), tmp_path], env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE, text=True,
        )
        for peer in (0, 1)
    ]  # fmt: skip
    for one in started:
        assert_trained(one.communicate(timeout=120)[0])
        assert one.returncode == 0


@pytest.mark.launch
@thorough
@pytest.mark.parametrize("name", LAUNCHED)
def test_launched(name, monkeypatch):
    launcher, ranks = LAUNCHED[name]
    assert shown(name) == command(launcher, ranks, name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    output = launch(launcher, ranks, FOLDER / name).stdout
    if name != "mpi_allreduce.py":
        assert_trained(output)
    else:
        assert re.search(r"4 ranks sent 10000 elements each; their sum has 39\d\d\d", output), output


@pytest.mark.launch
@thorough
@pytest.mark.parametrize("name", sorted(COUNTED))
def test_local_updates_send_no_gradients(name, monkeypatch):
    """The models send at least 7 MB of gradients without compression, and about 0.1 MB is for meeting each other."""
    assert shown(name) == command("torchrun", 2, name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    output = launch("torchrun", 2, ROOT / "tests" / "count_tcp.py", str(FOLDER / name)).stdout
    assert_trained(output)
    sent = [int(number) for number in re.findall(r"sent (\d+) bytes over TCP", output)]
    assert sent and max(sent) < 500_000, output


@pytest.mark.launch
@thorough
def test_lightning():
    """It starts its ranks itself."""
    assert shown(LIGHTNING) == f"python examples/{LIGHTNING}"
    done = subprocess.run(
        [sys.executable, FOLDER / LIGHTNING], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert_trained(done.stdout)


@pytest.mark.launch
@pytest.mark.elastic
def test_elastic():
    hosts = "examples/hosts.sh"
    assert shown(ELASTIC) == command("elastic", 2, ELASTIC).format(hosts=hosts)
    assert_trained(launch("elastic", 2, FOLDER / ELASTIC, hosts=hosts).stdout)


@pytest.mark.launch
@thorough
def test_tensorflow(monkeypatch):
    """Both examples in one start: TensorFlow's import takes longer than they do."""
    for name in TENSORFLOW:
        assert shown(name) == f"TF_USE_LEGACY_KERAS=1 {command('mpirun', 2, name)}"
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    scripts = [str(FOLDER / name) for name in TENSORFLOW]
    assert_trained(launch("mpirun", 2, Path(__file__).with_name("run_scripts.py"), *scripts).stdout, times=2)
