"""Finds the optimizer of a DDP model, which DDP does not show to a hook: PyTorch calls us before each first step."""

from __future__ import annotations

import weakref
from collections.abc import Container
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from hvd_deepreduce.engine import Engine, adaptive

INSTEAD = (
    'write optimizer = LocalSGD(optimizer, model, "adamw_safe", process_group=torch.distributed.group.WORLD) with the '
    "model itself in place of DistributedDataParallel(model), and optimizer.sync() at the end"
)


def find(engine: Engine, ids: Container[int]) -> None:
    """Looks at each optimizer of the model before its first step.

    Args:
        engine: of the model's gradients.
        ids: of the model's parameters.
    """
    if not engine.collectives.speaks():
        return
    seen: weakref.WeakSet[Any] = weakref.WeakSet()
    known = weakref.ref(engine)

    def look(optimizer: Any, *_: object) -> None:
        its = known()
        if its is None or its.adaptive is not None or optimizer in seen:
            return
        seen.add(optimizer)
        if any(id(parameter) in ids for group in optimizer.param_groups for parameter in group["params"]):
            adaptive.look_at(its, optimizer, INSTEAD)

    weakref.finalize(engine, register_optimizer_step_pre_hook(look).remove)
