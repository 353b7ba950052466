"""A config and an optimizer become the optimizer of a Horovod job on PyTorch."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch

from hvd_deepreduce import Config
from hvd_deepreduce.torch import DeepReduce, LocalSGD


def wrapped(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, config: str, seed: int = 0
) -> tuple[Any, DeepReduce | LocalSGD | None]:
    """Makes the parameters equal on all ranks, and wraps the optimizer.

    Args:
        config: a preset or a YAML file; with ``local`` it goes to LocalSGD. ``none``: dense gradients.

    Returns:
        The optimizer, and what has ``stats()``; None: Horovod, which has none.
    """
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    if config == "none":
        return hvd.DistributedOptimizer(optimizer, model.named_parameters()), None
    if Config.load(config).local is not None:
        local = LocalSGD(optimizer, model, config, seed=seed)
        return local, local
    compression = DeepReduce(model, config, seed=seed)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression), compression


def finish(optimizer: Any) -> None:
    """After the last step: the ranks' parameters become equal, also under LocalSGD."""
    if isinstance(optimizer, LocalSGD):
        optimizer.sync()
