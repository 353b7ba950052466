"""PyTorch: ``compression=DeepReduce(model, ...)`` for ``horovod.torch.DistributedOptimizer``; ``LocalSGD``;
``ddp``, the communication hook for ``DistributedDataParallel``; ``fsdp``, gradients between the replicas of a sharded
model; ``PeerOptimizer``, for peers that come and go; ``Capture``, which records gradients; and ``SignMomentum``, the
optimizer of the memory ``scaled_momentum``. The last six work without Horovod."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hvd_deepreduce.needs import needed

with needed("hvd_deepreduce.torch"):
    import_module("torch")  # first: where Horovod is missing too, PyTorch has to be named

if TYPE_CHECKING:
    from hvd_deepreduce.torch import ddp, fsdp
    from hvd_deepreduce.torch.capture import Capture
    from hvd_deepreduce.torch.horovod import DeepReduce
    from hvd_deepreduce.torch.local_sgd import LocalSGD
    from hvd_deepreduce.torch.peer_optimizer import PeerOptimizer
    from hvd_deepreduce.torch.sign_momentum import SignMomentum

_MODULES = {
    "Capture": "capture", "DeepReduce": "horovod", "LocalSGD": "local_sgd", "SignMomentum": "sign_momentum",
    "PeerOptimizer": "peer_optimizer", "ddp": "ddp", "fsdp": "fsdp",
}  # fmt: skip
__all__ = ["Capture", "DeepReduce", "LocalSGD", "PeerOptimizer", "SignMomentum", "ddp", "fsdp"]


def __getattr__(name: str) -> Any:
    # Imported when they are first used: a job may have no Horovod.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    otherwise = "Without Horovod there are ddp.deepreduce_hook, and LocalSGD(..., process_group=...)"
    with needed(f"hvd_deepreduce.torch.{name}", otherwise if name == "DeepReduce" else ""):
        if name in ("DeepReduce", "LocalSGD"):
            try:
                import_module("hvd_deepreduce.torch.elastic")  # makes both known to hvd.elastic.TorchState
            except ModuleNotFoundError:  # no Horovod
                if name == "DeepReduce":
                    raise
        module = import_module(f"hvd_deepreduce.torch.{_MODULES[name]}")
        found = globals()[name] = module if _MODULES[name] == name else getattr(module, name)
        return found
