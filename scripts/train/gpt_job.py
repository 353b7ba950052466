"""A GPT on the source of Python's standard library, on one core: a job of the arena.

A worker's parameters are views of one flat vector, so that updates, moments and momentum are operations of one vector.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

VOCABULARY = 97
"""Printable ASCII, the line feed, and one token for all other characters."""
CONTEXT, HEADS = 64, 4
BLOCK = 4096
"""Neighbouring characters of the text that are used together, for training or for validation."""


def tokens() -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The text for training and that for validation: every 20th block."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = b"\n".join(path.read_bytes() for path in sorted(library.glob("*.py")))
    table = np.full(256, 96, np.int64)
    table[32:127] = np.arange(95)
    table[10] = 95
    blocks = table[np.frombuffer(text, np.uint8)][: len(text) // BLOCK * BLOCK].reshape(-1, BLOCK)
    held_out = np.arange(len(blocks)) % 20 == 10
    return blocks[~held_out].ravel(), blocks[held_out].ravel()


class Gpt:
    """A decoder with norms before each part, no biases and no gains.

    Args:
        width: of the embeddings.
        layers: of attention and feed-forward.

    Attributes:
        SHAPES, SIZES, NUMEL: of the parameters, and their elements.
    """

    def __init__(self, width: int, layers: int) -> None:
        self.width, self.layers = width, layers
        self.SHAPES: list[tuple[int, ...]] = [(VOCABULARY, width), (CONTEXT, width)]
        for _ in range(layers):
            self.SHAPES += [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
        self.SIZES = [math.prod(shape) for shape in self.SHAPES]
        self.NUMEL = sum(self.SIZES)

    def initial(self, seed: int) -> Tensor:
        """The parameters of a new model, float32 ``[NUMEL]``: normal, and smaller where a block adds to the
        residual."""
        generator = torch.Generator().manual_seed(seed)
        parts = []
        for number, shape in enumerate(self.SHAPES):
            adds = number >= 2 and (number - 2) % 4 in (1, 3)
            scale = 0.02 / math.sqrt(2 * self.layers) if adds else 0.02
            parts.append(torch.randn(math.prod(shape), generator=generator) * scale)
        return torch.cat(parts)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parameters as leaves of autograd that share the memory of a flat vector."""
        parts = zip(torch.split(flat.detach(), self.SIZES), self.SHAPES, strict=True)
        return [part.view(shape).requires_grad_() for part, shape in parts]

    def scores(self, parameters: Sequence[Tensor], inputs: Tensor) -> Tensor:
        """Of each next character, float32 ``[batch * length, VOCABULARY]``."""
        batch, length = inputs.shape
        x, width = functional.embedding(inputs, parameters[0]) + parameters[1][:length], (self.width,)
        for layer in range(self.layers):
            qkv, out, up, down = parameters[2 + 4 * layer : 6 + 4 * layer]
            heads = functional.linear(functional.layer_norm(x, width), qkv).view(batch, length, 3, HEADS, -1)
            q, k, v = heads.permute(2, 0, 3, 1, 4)
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + functional.linear(attended.transpose(1, 2).reshape(batch, length, *width), out)
            hidden = functional.linear(functional.layer_norm(x, width), up)
            x = x + functional.linear(functional.gelu(hidden, approximate="tanh"), down)
        return functional.linear(functional.layer_norm(x, width), parameters[0]).flatten(0, 1)

    def loss(self, parameters: Sequence[Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy, in nats a character."""
        return functional.cross_entropy(self.scores(parameters, inputs), targets.flatten())

    def Job(self, batch: int = 4) -> Job:  # noqa: N802 - as the class
        """Batches and gradients of this model."""
        return Job(batch, self)


@torch.no_grad()
def measured(found: Tensor, targets: Tensor) -> Tensor:
    """The mean loss of scores in nats, and the accuracy: the share of the next characters that have the largest score.
    ``[2]``"""
    wanted = targets.flatten()
    return torch.stack([functional.cross_entropy(found, wanted), (found.argmax(1) == wanted).float().mean()])


def rate(step: int, steps: int) -> float:
    """Factor of the learning rate: linear over the first 5% of the steps, then half a cosine to 0."""
    warm = max(1, steps // 20)
    return (step + 1) / warm if step < warm else 0.5 + 0.5 * math.cos(math.pi * (step - warm) / (steps - warm))


def clipped(gradients: Tensor, most: float) -> Tensor:
    """Scales each row down to a norm of ``most``, in place."""
    gradients *= (most / gradients.norm(dim=-1, keepdim=True)).clamp(max=1.0)
    return gradients


class Job:
    """Batches of the workers, gradients, and the loss on the text for validation.

    Args:
        batch: sequences of a worker's batch.
        model: the GPT.

    Attributes:
        together: whether ``gradient`` takes the batches of several workers, whose mean gradient it computes at once.
    """

    together = True

    def __init__(self, batch: int = 4, model: Gpt | None = None) -> None:
        self.batch, self.model = batch, model or SMALL
        train, held_out = tokens()
        self.train = torch.from_numpy(train)
        self.held_out = torch.from_numpy(held_out)
        self._offsets = torch.arange(CONTEXT + 1)

    def windows(self, text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets ``[len(starts), CONTEXT]``."""
        rows = text[starts[:, None] + self._offsets]
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def batch_of(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs and targets ``[batch, CONTEXT]`` of windows that ``generator`` draws."""
        starts = torch.randint(len(self.train) - CONTEXT, (self.batch,), generator=generator)
        return self.windows(self.train, starts)

    def parameters(self, flat: Tensor) -> list[Tensor]:
        """Those of the model, for ``scores`` and for autograd."""
        return self.model.views(flat)

    def scores(self, parameters: Sequence[Tensor], inputs: Tensor) -> Tensor:
        """Of each next character, float32 ``[batch * length, VOCABULARY]``."""
        return self.model.scores(parameters, inputs)

    def gradient(self, flat: Tensor, generators: Sequence[torch.Generator], out: Tensor) -> None:
        """Writes the mean gradient of one batch of each worker at the parameters ``flat`` to ``out``, both float32
        ``[NUMEL]``."""
        batches = [self.batch_of(generator) for generator in generators]
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        parameters = self.parameters(flat)
        value = functional.cross_entropy(self.scores(parameters, inputs), targets.flatten())
        out.copy_(torch.cat([part.flatten() for part in torch.autograd.grad(value, parameters)]))

    @torch.no_grad()
    def validate(self, flat: Tensor, windows: int = 1024) -> tuple[float, float]:
        """Mean loss and accuracy of the parameters over the same windows, spread over the text for validation."""
        starts, parameters = torch.linspace(0, len(self.held_out) - CONTEXT - 1, windows).long(), self.parameters(flat)
        batches = [self.windows(self.held_out, part) for part in torch.split(starts, 64)]
        parts = [measured(self.scores(parameters, inputs), targets) for inputs, targets in batches]
        value, accuracy = torch.stack(parts).mean(0).tolist()
        return value, accuracy


SMALL = Gpt(128, 3)
"""0.6 million parameters."""
LARGE = Gpt(256, 3)
"""2.4 million."""
