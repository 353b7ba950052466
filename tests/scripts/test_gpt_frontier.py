"""The frontier of loss against bytes: the algorithm of updates, the table, and a short run."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from tests.ranks import ROOT

sys.path.append(str(ROOT / "scripts"))
import gpt_frontier  # noqa: E402
from gpt_frontier import METHODS, Method  # noqa: E402
from gpt_job import NUMEL, SIZES, initial, loss, views  # noqa: E402
from local_updates import LocalUpdates  # noqa: E402
from simulated_ranks import DenseRanks  # noqa: E402

from tests.scripts.frontier_checks import check_a_run  # noqa: E402


def test_a_model_that_knows_nothing_has_the_loss_of_a_uniform_guess():
    flat = initial(0)
    assert flat.shape == (NUMEL,) and sum(SIZES) == NUMEL
    tokens = torch.arange(64).view(1, 64) % 97
    assert loss(views(flat), tokens, tokens.flip(1)).item() == pytest.approx(np.log(97), abs=0.3)


def test_updates_without_compression_are_averaged():
    rng = np.random.default_rng(0)
    updates = LocalUpdates(DenseRanks(2), np.zeros(100, np.float32))
    updates.local += rng.standard_normal((2, 100)).astype(np.float32)
    expected = updates.local.mean(0)
    updates.synchronise()
    np.testing.assert_allclose(updates.local, [expected, expected], rtol=0, atol=1e-7)
    assert updates.job.sent == [400, 400]  # 2 (n - 1) / n of the bytes


def test_the_learning_rate_grows_with_the_root_of_the_workers_where_updates_want_it():
    assert Method("", longer=True).rate(4) == 2 * Method("", "dense").rate(4) == 2 * gpt_frontier.learning_rate(4)
    assert METHODS["adamw_safe"].rate(2) == pytest.approx(2**0.5 * METHODS["dense"].rate(2))


def test_a_run_is_repeatable_and_counts_its_bytes(tmp_path, monkeypatch):
    check_a_run(gpt_frontier, tmp_path, monkeypatch)
