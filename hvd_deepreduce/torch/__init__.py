"""PyTorch: ``compression=DeepReduce(model, ...)`` for ``horovod.torch.DistributedOptimizer``; ``LocalSGD``;
``ddp``, the communication hook for ``DistributedDataParallel``; and ``Capture``, which records gradients. The last
three work without Horovod."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hvd_deepreduce.needs import needed

if TYPE_CHECKING:
    from hvd_deepreduce.torch import ddp
    from hvd_deepreduce.torch.capture import Capture
    from hvd_deepreduce.torch.horovod import DeepReduce
    from hvd_deepreduce.torch.local_sgd import LocalSGD

__all__ = ["Capture", "DeepReduce", "LocalSGD", "ddp"]


def __getattr__(name: str) -> Any:
    # Imported when they are first used: a job may have no Horovod.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    otherwise = "Without Horovod there are ddp.deepreduce_hook, and LocalSGD(..., process_group=...)"
    with needed(f"hvd_deepreduce.torch.{name}", otherwise if name == "DeepReduce" else ""):
        return _imported(name)


def _imported(name: str) -> Any:
    if name == "ddp":
        return import_module("hvd_deepreduce.torch.ddp")
    if name == "Capture":
        return import_module("hvd_deepreduce.torch.capture").Capture
    try:
        from hvd_deepreduce.torch import (
            checks,  # noqa: F401  (checks each step of Horovod's optimizers)
            elastic,  # noqa: F401  (makes both known to hvd.elastic.TorchState)
        )
    except ModuleNotFoundError:  # no Horovod
        if name == "DeepReduce":
            raise
    module = import_module("hvd_deepreduce.torch." + {"DeepReduce": "horovod", "LocalSGD": "local_sgd"}[name])
    found = globals()[name] = getattr(module, name)
    return found
