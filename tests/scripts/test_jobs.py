"""The language models of the arena, and updates without compression."""

from __future__ import annotations

import lstm_job
import numpy as np
import pytest
import torch
from gpt_job import SMALL, clipped
from local_updates import LocalUpdates
from simulated_ranks import DenseRanks


def test_a_model_that_knows_nothing_has_the_loss_of_a_uniform_guess():
    flat = SMALL.initial(0)
    assert flat.shape == (SMALL.NUMEL,) and sum(SMALL.SIZES) == SMALL.NUMEL
    tokens = torch.arange(64).view(1, 64) % 97
    assert SMALL.loss(SMALL.views(flat), tokens, tokens.flip(1)).item() == pytest.approx(np.log(97), abs=0.3)


def test_a_gradient_is_that_of_the_module_and_of_both_batches():
    assert sum(lstm_job.SIZES) == lstm_job.NUMEL == lstm_job.initial(0).numel()
    job, flat, out = lstm_job.Job(2), lstm_job.initial(0), torch.zeros(lstm_job.NUMEL)
    seeded = [[torch.Generator().manual_seed(seed) for seed in (1, 2)] for _ in range(2)]
    job.gradient(flat, seeded[0], out)
    model = lstm_job.Lstm()
    torch.nn.utils.vector_to_parameters(flat, model.parameters())
    losses = [model.loss(*job.batch_of(generator)) for generator in seeded[1]]
    assert losses[0].item() == pytest.approx(np.log(97), abs=0.3), "it knows nothing yet"
    (sum(losses) / 2).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-7)


def test_each_gradient_is_clipped_by_itself():
    gradients = torch.tensor([[3.0, 4.0], [0.03, 0.04], [0.0, 0.0]])
    torch.testing.assert_close(clipped(gradients, 0.25).norm(dim=1), torch.tensor([0.25, 0.05, 0.0]))


def test_updates_without_compression_are_averaged():
    rng = np.random.default_rng(0)
    updates = LocalUpdates(DenseRanks(2), np.zeros(100, np.float32))
    updates.local += rng.standard_normal((2, 100)).astype(np.float32)
    expected = updates.local.mean(0)
    updates.synchronise()
    np.testing.assert_allclose(updates.local, [expected, expected], rtol=0, atol=1e-7)
    assert updates.job.sent == [400, 400]  # 2 (n - 1) / n of the bytes
