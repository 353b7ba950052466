"""Trains a PyTorch model on simulated ranks (simulated_ranks.py), whose gradients one model computes one by one.

Its normalization therefore sees all ranks' batches.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from simulated_ranks import Ranks
from torch.nn import functional

Vector = npt.NDArray[np.float32]


class Network:
    """A module whose parameters are read, written and stepped as one vector, float32 ``[numel]``.

    Attributes:
        parameters: of the module, in its order.
        sizes: their elements.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.parameters = model, list(model.parameters())
        self.sizes = [parameter.numel() for parameter in self.parameters]

    def vector(self) -> Vector:
        """A copy of the parameters."""
        return torch.nn.utils.parameters_to_vector(self.parameters).detach().numpy()

    def load(self, vector: Vector) -> None:
        """Copies a vector to the parameters."""
        torch.nn.utils.vector_to_parameters(torch.from_numpy(vector.copy()), self.parameters)

    def gradient(self, loss: torch.Tensor) -> Vector:
        """Of a loss."""
        parts = torch.autograd.grad(loss, self.parameters)
        return torch.cat([part.reshape(-1) for part in parts]).numpy()

    def step(self, optimizer: torch.optim.Optimizer, gradient: Vector) -> None:
        """A step of an optimizer of the parameters."""
        for parameter, part in zip(self.parameters, torch.from_numpy(gradient).split(self.sizes), strict=True):
            parameter.grad = part.reshape(parameter.shape)
        optimizer.step()


def epochs(
    network: Network, job: Ranks, optimizer: Any, schedule: Any, data: Sequence[torch.Tensor], count: int, batch: int,
    seed: int,
) -> Iterator[tuple[float, list[float]]]:  # fmt: skip
    """Trains a classifier; images that are left over from the last whole step of an epoch are not seen.

    Args:
        job: exchanges the gradients.
        schedule: of the optimizer, by steps.
        data: training images, labels, test images, labels.
        batch: images a rank and step.
        seed: of the images' order, in which the ranks take turns.

    Yields:
        After each epoch the accuracy on the test images, and the loss of each rank in each step.
    """
    images, labels, test, test_labels = data
    ranks, model = len(job.residuals), network.model
    for number in range(count):
        order, losses = torch.randperm(len(images), generator=torch.Generator().manual_seed(1000 * seed + number)), []
        model.train()
        for step in range(len(images) // (ranks * batch)):
            vectors = []
            for rank in range(ranks):
                chosen = order[rank::ranks][step * batch : (step + 1) * batch]
                loss = functional.cross_entropy(model(images[chosen]), labels[chosen])
                vectors.append(network.gradient(loss))
                losses.append(loss.item())
            network.step(optimizer, job.mean(vectors))
            schedule.step()
        yield accuracy(model, test, test_labels), losses


def accuracy(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """The share of images that a classifier names right, without its training mode."""
    model.eval()
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())
