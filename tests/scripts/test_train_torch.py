"""The digits job: it learns, and a resumed run equals an unbroken one to the bit."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path

import pytest
import yaml

from hvd_deepreduce import Config
from tests.ranks import ROOT, launch

PROGRAM = ROOT / "scripts" / "train" / "train_torch.py"
pytestmark = pytest.mark.launch
RECOMMENDED = "configs/recommended.yaml"
SMALL = ("--width", "8", "--epochs", "3", "--batch-size", "64")


def train(out: Path, *arguments: str, check: bool = True) -> str:
    return launch("mpirun", 2, PROGRAM, *SMALL, "--out", str(out), *arguments, check=check).stdout


def checkpoint(out: Path, rank: int) -> dict:
    import torch

    return torch.load(out / f"checkpoint.rank{rank}.pt")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Copies the folder of a run that was stopped after two of three epochs: ``stopped(config, folder)``."""

    @cache
    def run(config):
        out = tmp_path_factory.mktemp("stopped")
        train(out, "--config", config, "--stop-after", "2")
        return out

    return lambda config, folder: shutil.copytree(run(config), folder)


def test_a_resumed_run_equals_an_unbroken_one(tmp_path, stopped):
    import torch

    whole, parts, config = tmp_path / "whole", tmp_path / "parts", RECOMMENDED
    assert "epoch  3/3" in train(whole, "--config", config)
    stopped(config, parts)
    assert len(json.loads((parts / "metrics.json").read_text())["epochs_done"]) == 2
    train(parts, "--config", config, "--resume")
    for rank in (0, 1):
        one, other = checkpoint(whole, rank), checkpoint(parts, rank)
        assert all(torch.equal(one["model"][name], other["model"][name]) for name in one["model"])
        residuals = one["compression"]["residuals"]
        assert residuals
        for name, residual in residuals.items():
            assert torch.equal(residual, other["compression"]["residuals"][name])
    # The parameters are the same on both ranks; what they have not sent is not.
    one, other = checkpoint(whole, 0), checkpoint(whole, 1)
    assert torch.equal(one["model"]["head.weight"], other["model"]["head.weight"])
    metrics = json.loads((whole / "metrics.json").read_text())
    losses = [row["loss"] for row in metrics["epochs_done"]]
    assert losses[-1] < losses[0]
    used = yaml.safe_load((whole / "config.yaml").read_text())
    assert used == Config.load(ROOT / config, seed=0).to_dict()


def test_ddp_under_torchrun(tmp_path):
    arguments = (*SMALL, "--launcher", "ddp", "--config", "topk_rice_qsgd", "--out", str(tmp_path))
    said = launch("torchrun", 2, PROGRAM, *arguments, "--stop-after", "2").stdout
    assert "epoch  2/3" in said, said
    said = launch("torchrun", 2, PROGRAM, *arguments, "--resume").stdout
    assert "epoch  3/3" in said and "epoch  2/3" not in said, said
    rows = json.loads((tmp_path / "metrics.json").read_text())["epochs_done"]
    assert [row["epoch"] for row in rows] == [1, 2, 3] and rows[-1]["loss"] < rows[0]["loss"]
    assert all(0 < row["bytes_sent"] < 0.1 * row["dense_bytes"] for row in rows)
    assert checkpoint(tmp_path, 0)["compression"]["residuals"]


def test_resume_without_a_checkpoint_says_so(tmp_path):
    ended = launch("mpirun", 2, PROGRAM, *SMALL, "--out", str(tmp_path), "--resume", check=False)
    assert ended.returncode and "there is no checkpoint checkpoint.rank" in ended.stdout


def test_resume_from_checkpoints_of_different_epochs_says_so(tmp_path, stopped):
    import torch

    parts = stopped(RECOMMENDED, tmp_path / "parts")
    older = checkpoint(parts, 1)
    older["history"].pop()
    torch.save(older, parts / "checkpoint.rank1.pt")
    said = train(parts, "--config", RECOMMENDED, "--resume", check=False)
    assert "are of epochs [2, 1], by rank" in said, said
