"""PyTorch: ``compression=DeepReduce(model, ...)`` for ``horovod.torch.DistributedOptimizer``; ``LocalSGD``; and
``ddp``, the communication hook for ``DistributedDataParallel``, which needs no Horovod."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvd_deepreduce.torch import ddp
    from hvd_deepreduce.torch.horovod import DeepReduce
    from hvd_deepreduce.torch.local_sgd import LocalSGD

__all__ = ["DeepReduce", "LocalSGD", "ddp"]


def __getattr__(name: str) -> Any:
    # Imported when they are first used: a job without Horovod has only some of them.
    if name == "ddp":
        import hvd_deepreduce.torch.ddp as module

        return module
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # ``checks`` checks each step of Horovod's optimizers; ``elastic`` makes both known to hvd.elastic.TorchState.
    from hvd_deepreduce.torch import checks, elastic, horovod, local_sgd  # noqa: F401

    globals().update(DeepReduce=horovod.DeepReduce, LocalSGD=local_sgd.LocalSGD)
    return globals()[name]
