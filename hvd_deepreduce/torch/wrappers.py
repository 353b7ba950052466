"""Finds what LocalSGD cannot be used with: models and optimizers that exchange gradients or parameters themselves."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

REDUCES = (
    "reduces all gradients in each backward pass, while LocalSGD exchanges updates in their place: it would save "
    "nothing. Make LocalSGD with the bare model, and remove the DistributedDataParallel wrapper: model = model.module"
)
SHARDED = (
    "and LocalSGD needs whole parameters on every rank: FSDP is not supported yet. Use LocalSGD with the bare model, "
    "or DistributedDataParallel with the hook of hvd_deepreduce.torch.ddp"
)


def refuse_wrapped(optimizer: torch.optim.Optimizer, model: object, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
    """
    Args:
        model: that LocalSGD was given.
        pairs: its parameters, by name.

    Raises:
        TypeError: the model is, or contains, one of DistributedDataParallel or FSDP; or the optimizer is a
            ZeroRedundancyOptimizer.
    """
    for name, module in model.named_modules() if isinstance(model, torch.nn.Module) else ():
        kinds = _kinds(module)
        what = f"the model contains {name}," if name else "the model is"
        # DDP is also what torch.distributed._composable.replicate makes of a module's class.
        if kinds & {"DistributedDataParallel", "DDP"}:
            raise TypeError(f"{what} a DistributedDataParallel model, which {REDUCES}")
        if kinds & {"FullyShardedDataParallel", "FSDPModule"}:
            raise TypeError(f"{what} sharded by FSDP, {SHARDED}")
    for name, tensor in pairs:
        if "DTensor" in _kinds(tensor) or getattr(tensor, "_is_flat_param", False):
            raise TypeError(f"the parameter {name} is sharded (FSDP), {SHARDED}")
    if "ZeroRedundancyOptimizer" in _kinds(optimizer):
        raise TypeError(
            "the first argument of LocalSGD is a ZeroRedundancyOptimizer, which trains a part of the parameters on "
            "each rank, while LocalSGD lets each rank train all of them: give LocalSGD the optimizer that it is made of"
        )


def _kinds(value: object) -> set[str]:
    """Names of PyTorch's classes that it is an instance of. They need not be imported for this."""
    return {kind.__name__ for kind in type(value).__mro__ if kind.__module__.startswith("torch.")}


class Reductions:
    """Finds a DistributedDataParallel model that LocalSGD was not given, but that is called to train its parameters.

    Args:
        tensors: the parameters.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = {id(one) for one in tensors}
        self._seen: Mapping[Any, list[int]] | None = None
        self._compared = False

    def check(self) -> None:
        """Called before each step; looks at the first two. A model that nobody calls is no mistake.

        Raises:
            TypeError: one has reduced gradients between them.
        """
        if self._compared or not (dist.is_available() and dist.is_initialized()):
            return
        if self._seen is None:
            wrapper = torch.nn.parallel.DistributedDataParallel
            made = [one for one in gc.get_objects() if wrapper in type(one).__mro__]
            ours = [one for one in made if any(id(p) in self._tensors for p in one.module.parameters())]
            self._seen = weakref.WeakKeyDictionary({one: _times(one) for one in ours})
            return
        self._compared = True
        if any(_times(one) != times for one, times in self._seen.items()):
            raise TypeError(f"a DistributedDataParallel model trains the parameters of LocalSGD. It {REDUCES}")


def _times(model: Any) -> list[int]:
    """When its gradients came in its last reduction, in nanoseconds."""
    return list(model.reducer.get_backward_stats())
