"""What the programs of cases for PyTorch train (see common.py)."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import nn

from tests.adapters.common import Job, on


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 30), nn.Tanh(), nn.Linear(30, 4))


def batch(step, rank=None):
    generator = torch.Generator().manual_seed(1000 * step + (on.rank() if rank is None else rank))
    x = torch.randn(16, 20, generator=generator)
    return x, x[:, :4].argmax(1)


class Given(nn.Module):
    """Its gradients are those that it is called with, arrays or tensors. Its parameters are arrays by name."""

    def __init__(self, arrays):
        super().__init__()
        for name, one in arrays.items():
            self.register_parameter(name, nn.Parameter(torch.from_numpy(np.array(one))))

    def forward(self, gradients):
        return sum((p * torch.as_tensor(g)).sum() for p, g in zip(self.parameters(), gradients, strict=True))


def loss_of(model, step, rank=None):
    """Of a batch, or of the gradients that are given in place of a step's number."""
    if not isinstance(step, int):
        return model(step)
    x, y = batch(step, rank)
    first = next(model.parameters())
    return nn.functional.cross_entropy(model(x.to(first)).float(), y.to(first.device))


def flat(model):
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])


def arrays(tensors):
    """Flat copies, float32 or float64."""
    wide = (one.detach().to(torch.promote_types(one.dtype, torch.float32)) for one in tensors)
    return [one.reshape(-1).numpy().copy() for one in wide]


class TorchJob(Job):
    """Attributes: ``model``, without DDP's wrapper; ``called``, with it; ``optimizer``; ``passes``, backward passes
    before each step."""

    passes = 1

    def gradients(self, step, rank=None):
        return arrays(torch.autograd.grad(loss_of(self.model, step, rank), list(self.model.parameters())))

    def backward(self, step, factor=1.0):
        self.optimizer.zero_grad()
        for one in [step] if self.passes == 1 else range(self.passes * step, self.passes * (step + 1)):
            (factor * loss_of(self.called, one)).backward()

    def gradient_arrays(self):
        return arrays(parameter.grad for parameter in self.model.parameters())

    def names(self):
        return [name for name, _ in self.model.named_parameters()]

    def values(self):
        return arrays(self.model.parameters())

    def saved(self):
        return [p.detach().clone() for p in self.model.parameters()], copy.deepcopy(self.compression.state_dict())

    def load(self, saved):
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), saved[0], strict=True):
                parameter.copy_(value)
        self.compression.load_state_dict(saved[1])
