"""A character LSTM on the source of Python's standard library, on one core: a job of the arena.

A worker's parameters are views of one flat vector, as in gpt_job.py, which has the text and the batches.
"""

import math
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

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.layers(self.symbol(inputs))[0]).flatten(0, 1)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy, in nats a character, of int64 ``[batch, length]``."""
        return functional.cross_entropy(self(inputs), targets.flatten())


SHAPES = [tuple(parameter.shape) for parameter in Lstm().parameters()]
SIZES = [math.prod(shape) for shape in SHAPES]
NUMEL = sum(SIZES)


def initial(seed: int) -> Tensor:
    """The parameters of a new model, float32 ``[NUMEL]``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.utils.parameters_to_vector(Lstm().parameters()).detach()


class Job(gpt_job.Job):
    """As the GPT's."""

    def __init__(self, batch: int) -> None:
        super().__init__(batch)
        self._model = Lstm()

    def parameters(self, flat: Tensor) -> list[Tensor]:
        nn.utils.vector_to_parameters(flat, self._model.parameters())
        return list(self._model.parameters())

    def scores(self, parameters: Sequence[Tensor], inputs: Tensor) -> Tensor:
        return self._model(inputs)
