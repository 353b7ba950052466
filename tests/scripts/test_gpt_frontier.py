"""The frontier of loss against bytes: the algorithm of updates, the table, and a short run."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch

from tests.ranks import ROOT

sys.path.append(str(ROOT / "scripts"))
import gpt_frontier  # noqa: E402
from gpt_frontier import METHODS, Method, Updates, rows, signs, train  # noqa: E402
from gpt_job import NUMEL, SIZES, initial, loss, views  # noqa: E402


def locals_after(anchor: torch.Tensor, seed: int) -> torch.Tensor:
    """Parameters of two workers some steps after the anchor."""
    return anchor + 0.01 * torch.randn(2, NUMEL, generator=torch.Generator().manual_seed(seed))


def test_a_model_that_knows_nothing_has_the_loss_of_a_uniform_guess():
    flat = initial(0)
    assert flat.shape == (NUMEL,) and sum(SIZES) == NUMEL
    tokens = torch.arange(64).view(1, 64) % 97
    assert loss(views(flat), tokens, tokens.flip(1)).item() == pytest.approx(np.log(97), abs=0.3)


def test_updates_without_compression_average_the_workers():
    updates, start = Updates(Method("", every=4), 2, initial(0)), initial(0)
    local = locals_after(start, 1)
    expected = local.mean(0)
    updates.synchronise(local)
    torch.testing.assert_close(local[0], expected, rtol=0, atol=1e-7)
    assert torch.equal(local[0], local[1]) and updates.sent == 4 * NUMEL  # 2 (n - 1) / n of the bytes


def test_what_is_sent_and_what_remains_is_the_progress_and_momentum_is_that_of_nesterov():
    method = Method("", config=signs(0.1), every=4, momentum=0.4, decay=0.5)
    updates, anchor = Updates(method, 2, initial(0)), initial(0)
    residuals, buffer = torch.zeros(2, NUMEL), torch.zeros(NUMEL)
    for seed in (1, 2):
        local = locals_after(anchor, seed)
        due = 0.5 * residuals + anchor - local
        updates.synchronise(local)
        assert updates.ranks is not None
        residuals = torch.from_numpy(np.stack(updates.ranks.residuals))
        sent = (due - residuals).mean(0)
        buffer = 0.4 * buffer + sent
        anchor = anchor - (sent + 0.4 * buffer)
        torch.testing.assert_close(local[0], anchor, rtol=0, atol=1e-6)
        anchor = local[0].clone()
    assert 0 < updates.sent < 2 * NUMEL / 8


def test_a_run_is_repeatable_and_counts_its_bytes(tmp_path, monkeypatch):
    monkeypatch.setitem(METHODS, "short", Method("short", config=signs(0.1), every=2, momentum=0.4))
    first, again = (train("short", 2, 3, 0) for _ in range(2))
    assert {**first, "seconds": 0} == {**again, "seconds": 0}
    assert 0 < first["share"] < 0.03
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps(first) + "\n")
    assert gpt_frontier.load(path) == [first]
    monkeypatch.setitem(METHODS, "short", Method("short", config=signs(0.1), every=3, momentum=0.4))
    assert gpt_frontier.load(path) == [], "a run with other settings counts no more"


def test_gaps_are_between_runs_of_the_same_seed():
    facts = {"workers": 2, "steps": 10, "share": 1.0}
    runs = [{**facts, "name": "dense", "seed": seed, "loss": value} for seed, value in enumerate((1.0, 2.0))]
    runs += [{**facts, "name": "plain", "seed": seed, "loss": value} for seed, value in enumerate((1.5, 2.1, 9.0))]
    dense, plain = rows(runs, 10)
    assert (dense["gap"], plain["seeds"]) == (0, 3)
    assert plain["gap"] == pytest.approx(0.3) and plain["most"] == 0.5
