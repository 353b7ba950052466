"""Muon on flat vectors of several workers, in float32.

Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024; the scale of a step is that of Liu et
al., "Muon is scalable for LLM training", 2025, 0.2 * sqrt(max(rows, columns)), so that learning rate and weight decay
are AdamW's. ``torch.optim.Muon`` does the same in bfloat16, which takes ten times as long on a processor that does not
compute with it; tests compare the two.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the polynomial of a Newton-Schulz step, as published."""


def orthogonal(matrices: Tensor, steps: int = 5) -> Tensor:
    """Nearly the orthogonal factor of the polar decomposition of each matrix, ``[n, rows, columns]``."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        square = x @ x.mT  # baddbmm adds in the pass that multiplies: [n, r, r], [n, r, c]
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def separated(shapes: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Of the parts of a model. Query, key and value, a part with three times as many rows as columns, become three, as
    Jordan et al. found better."""
    found: list[tuple[int, ...]] = []
    for rows, columns in shapes:
        found += [(columns, columns)] * 3 if rows == 3 * columns else [(rows, columns)]
    return found


class Muon(torch.optim.Optimizer):
    """Muon for the hidden matrices, AdamW for the others, with one learning rate.

    Args:
        models: of all workers, ``[workers, numel]``.
        shapes: of the parts of a model. The first two are embeddings.
        lr: the learning rate.
        momentum: of Muon, Nesterov's.
        weight_decay: decoupled.
        beta2: of AdamW.
        embeddings: the number of parts, at the beginning, that AdamW steps.
    """

    def __init__(
        self, models: torch.nn.Parameter, shapes: Sequence[Sequence[int]], lr: float, momentum: float,
        weight_decay: float, beta2: float, embeddings: int = 2,
    ) -> None:  # fmt: skip
        super().__init__([models], {"lr": lr})
        self.models, self.momentum, self.weight_decay, self.betas = models, momentum, weight_decay, (0.9, beta2)
        self.sizes, self.shapes = [math.prod(shape) for shape in shapes], [tuple(shape) for shape in shapes]
        self.head, self.steps = sum(self.sizes[:embeddings]), 0
        self.parts = list(zip(self.sizes, self.shapes, strict=True))[embeddings:]
        self.first, self.second = torch.zeros_like(models), torch.zeros_like(models[:, : self.head])

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        lr, gradient, head = self.param_groups[0]["lr"], self.models.grad, self.head
        beta1, beta2 = self.betas
        self.steps += 1
        self.models.mul_(1 - lr * self.weight_decay)
        first, embedded = self.first[:, :head], gradient[:, :head]
        first.lerp_(embedded, 1 - beta1)
        self.second.mul_(beta2).addcmul_(embedded, embedded, value=1 - beta2)
        scale = (self.second / (1 - beta2**self.steps)).sqrt_().add_(1e-8)
        self.models[:, :head].addcdiv_(first, scale, value=-lr / (1 - beta1**self.steps))
        hidden = self.first[:, head:]
        hidden.lerp_(gradient[:, head:], 1 - self.momentum)
        nesterov = gradient[:, head:].lerp(hidden, self.momentum)
        at = 0
        for size, shape in self.parts:
            matrix = nesterov[:, at : at + size].view(-1, *shape)
            step = orthogonal(matrix).reshape(len(matrix), size)
            self.models[:, head + at : head + at + size].add_(step, alpha=-0.2 * lr * math.sqrt(max(shape)))
            at += size
