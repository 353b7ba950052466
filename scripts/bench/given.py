"""Models in PyTorch whose gradients are given, so that a step has little more than the exchange."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Given(nn.Module):
    """Parameters of these sizes, whose gradients are those that ``forward`` is given.

    Args:
        sizes: elements of each.
        weights: their memory; None: zeros.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[Tensor] | None = None) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.zeros(size) for size in sizes] if weights is None else weights)

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        return torch.stack([p @ g for p, g in zip(self.parts, gradients, strict=True)]).sum()

    def named(self, name: str) -> list[tuple[str, nn.Parameter]]:
        """The parameters with names that begin with that of a job: Horovod knows tensors by their names."""
        return [(f"{name}.{number:03}", parameter) for number, parameter in enumerate(self.parts)]


def horovod_optimizer(
    name: str, model: Given, way: str, lr: float = 1e-3, **settings: Any
) -> tuple[torch.optim.Optimizer, Any]:
    """SGD under ``hvd.DistributedOptimizer``, and its compression.

    Args:
        name: of the job.
        way: ``local``: without Horovod; ``dense``, ``fp16``, or a config's name.
        settings: beside the config's.
    """
    import horovod.torch as hvd

    from hvd_deepreduce.torch import DeepReduce

    named, optimizer = model.named(name), torch.optim.SGD(model.parameters(), lr)
    compression: Any = hvd.Compression.fp16 if way == "fp16" else hvd.Compression.none
    if way not in ("local", "dense", "fp16"):
        compression = DeepReduce(named, way, **settings)
    if way != "local":
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compression)
    return optimizer, compression


def horovod_job(
    name: str, model: Given, way: str, lr: float = 1e-3, **settings: Any
) -> tuple[Callable[[Sequence[Tensor]], None], Any]:
    """A step of ``horovod_optimizer`` with the gradients of all parameters, and the compression."""
    optimizer, compression = horovod_optimizer(name, model, way, lr, **settings)

    def step(gradients: Sequence[Tensor]) -> None:
        optimizer.zero_grad()
        model(gradients).backward()
        optimizer.step()

    return step, compression
