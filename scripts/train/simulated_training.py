"""Trains a PyTorch model on simulated ranks (simulated_ranks.py), whose gradients one model computes one by one.

Its normalization therefore sees all ranks' batches.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from simulated_ranks import DenseRanks, SimulatedRanks
from torch.nn import functional

Vector = npt.NDArray[np.float32]


def flat(gradients: Iterable[torch.Tensor]) -> Vector:
    """One behind the other, float32 ``[numel]``."""
    vector: Vector = torch.cat([gradient.reshape(-1) for gradient in gradients]).numpy()
    return vector


def apply(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], gradient: Vector) -> None:
    """A step with the gradient of all parameters, float32 ``[numel]``."""
    parts = torch.from_numpy(gradient).split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.reshape(parameter.shape)
    optimizer.step()


def epoch(
    model: torch.nn.Module,
    job: DenseRanks | SimulatedRanks,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    images: torch.Tensor,
    labels: torch.Tensor,
    batch: int,
    seed: int,
) -> list[float]:
    """One epoch of a classifier; images that are left over from the last whole step are not seen.

    Args:
        job: exchanges the gradients.
        schedule: of the optimizer, by steps.
        batch: images a rank and step.
        seed: of the images' order, in which the ranks take turns.

    Returns:
        The loss of each rank in each step.
    """
    ranks, parameters, losses = len(job.residuals), list(model.parameters()), []
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    model.train()
    for step in range(len(images) // (ranks * batch)):
        vectors = []
        for rank in range(ranks):
            chosen = order[rank::ranks][step * batch : (step + 1) * batch]
            loss = functional.cross_entropy(model(images[chosen]), labels[chosen])
            vectors.append(flat(torch.autograd.grad(loss, parameters)))
            losses.append(loss.item())
        apply(optimizer, parameters, job.mean(vectors))
        schedule.step()
    return losses


def accuracy(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """The share of images that a classifier names right, without its training mode."""
    model.eval()
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())
