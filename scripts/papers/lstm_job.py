"""A character LSTM on the source of Python's standard library, on one core: a job of frontier.py.

A worker's parameters are views of one flat vector, as in gpt_job.py, which has the text and the batches.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("train",))

import gpt_job
import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HIDDEN = 64, 256


class Lstm(nn.Module):
    """Embedding, LSTM and a linear head, with PyTorch's initial parameters. A window begins with a state of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.symbol = nn.Embedding(gpt_job.VOCABULARY, WIDTH)
        self.layers = nn.LSTM(WIDTH, HIDDEN, batch_first=True)
        self.head = nn.Linear(HIDDEN, gpt_job.VOCABULARY)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy, in nats a character, of int64 ``[batch, length]``."""
        scores = self.head(self.layers(self.symbol(inputs))[0])
        return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


SIZES = [parameter.numel() for parameter in Lstm().parameters()]
NUMEL = sum(SIZES)


def initial(seed: int) -> Tensor:
    """The parameters of a new model, float32 ``[NUMEL]``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.utils.parameters_to_vector(Lstm().parameters()).detach()


class Job(gpt_job.Job):
    """Batches of the workers, gradients, and the loss on the text for validation.

    Args:
        batch: windows of a worker's batch.
    """

    def __init__(self, batch: int) -> None:
        super().__init__(batch)
        self._model = Lstm()
        self._parameters = list(self._model.parameters())

    def gradient(self, flat: Tensor, generators: Sequence[torch.Generator], out: Tensor) -> None:
        """Writes the mean gradient of one batch of each worker to ``out``.

        Args:
            flat: the parameters, float32 ``[NUMEL]``.
            generators: of the workers, which draw their batches.
            out: float32 ``[NUMEL]``.
        """
        batches = [self.batch_of(generator) for generator in generators]
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        nn.utils.vector_to_parameters(flat, self._parameters)
        gradients = torch.autograd.grad(self._model.loss(inputs, targets), self._parameters)
        torch.cat([gradient.flatten() for gradient in gradients], out=out)

    @torch.no_grad()
    def validate(self, flat: Tensor, windows: int = 1024) -> float:
        """The mean loss over the same windows, spread over the text for validation."""
        nn.utils.vector_to_parameters(flat, self._parameters)
        starts = torch.linspace(0, len(self.held_out) - gpt_job.CONTEXT - 1, windows).long()
        parts = [self._model.loss(*self.windows(self.held_out, part)) for part in torch.split(starts, 64)]
        return float(torch.stack(parts).mean())
