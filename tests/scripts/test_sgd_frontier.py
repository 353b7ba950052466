"""The frontier of loss against bytes under SGD with momentum: the job, the methods, the table, and short runs."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from tests.ranks import ROOT

sys.path.append(str(ROOT / "scripts"))
import sgd_frontier  # noqa: E402
from frontier import picture, rows, table  # noqa: E402
from lstm_job import NUMEL, SIZES, Job, Lstm, initial  # noqa: E402
from sgd_frontier import CLIP, METHODS, Method, clipped, train  # noqa: E402

from hvd_deepreduce import Config  # noqa: E402
from hvd_deepreduce.config import presets  # noqa: E402
from tests.scripts.frontier_checks import check_a_run  # noqa: E402


def generators() -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in (1, 2)]


def test_a_gradient_is_that_of_the_module_and_of_both_batches():
    assert sum(SIZES) == NUMEL == initial(0).numel()
    job, flat, out = Job(2), initial(0), torch.zeros(NUMEL)
    job.gradient(flat, generators(), out)
    model = Lstm()
    torch.nn.utils.vector_to_parameters(flat, model.parameters())
    losses = [model.loss(*job.batch_of(generator)) for generator in generators()]
    assert losses[0].item() == pytest.approx(np.log(97), abs=0.3), "it knows nothing yet"
    (sum(losses) / 2).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-7)


def test_each_gradient_is_clipped_by_itself():
    gradients = torch.tensor([[3.0, 4.0], [0.03, 0.04], [0.0, 0.0]])
    torch.testing.assert_close(clipped(gradients).norm(dim=1), torch.tensor([CLIP, 0.05, 0.0]))


def test_a_step_without_compression_is_that_of_dense(monkeypatch):
    monkeypatch.setattr(sgd_frontier, "CLIP", 1e9)  # so that clipping before or after the mean is the same
    for name, method in {
        "dense": Method("", "dense"), "averaged": Method(""), "gradients": Method("", "gradients")
    }.items():  # fmt: skip
        monkeypatch.setitem(METHODS, name, method)
    runs = [train(name, 2, 3, 0) for name in ("dense", "averaged", "gradients")]
    assert all(run["share"] == 1 for run in runs)
    assert [run["loss"] for run in runs[1:]] == pytest.approx(2 * [runs[0]["loss"]], abs=1e-5)


def test_a_run_is_repeatable_and_counts_its_bytes(tmp_path, monkeypatch):
    check_a_run(sgd_frontier, tmp_path, monkeypatch)


def test_gaps_are_between_runs_of_the_same_seed(tmp_path):
    facts = {"workers": 2, "steps": 10, "share": 1.0}
    runs = [{**facts, "name": "dense", "seed": seed, "loss": value} for seed, value in enumerate((1.0, 2.0))]
    runs += [{**facts, "name": "plain", "seed": seed, "loss": value} for seed, value in enumerate((1.5, 2.1, 9.0))]
    words = {"dense": "all", "plain": "some"}
    dense, plain = found = rows([*runs, {**runs[0], "steps": 11}], words, 10)
    assert (dense["gap"], plain["seeds"]) == (0, 3)
    assert plain["gap"] == pytest.approx(0.3) and plain["most"] == 0.5
    assert table(found, words).splitlines()[3] == "| 2 | some | 100.00% | 4.2000 | +0.300 (+0.100 to +0.500) | 3 |"
    picture(found, words, 0.03, "title", tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 10_000


PRESETS = [name for name, method in METHODS.items() if method.sends == "updates" and name in presets.names()]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_of_local_sgd_is_the_method_of_its_name(name):
    method, preset = METHODS[name], Config.load(name)
    assert preset.local is not None
    assert (preset.local.every, preset.local.momentum, preset.local.decay, preset.local.lr) == (
        method.every, method.momentum, method.decay, 1.0,
    )  # fmt: skip
    assert Config.load(method.config, local=None) == Config.load(preset, local=None)


def test_sgd_small_is_among_the_methods():
    assert "sgd_small" in PRESETS
