"""PyTorch: ``compression=DeepReduce(model, ...)`` for ``horovod.torch.DistributedOptimizer``."""

from hvd_deepreduce.torch import (
    checks,  # noqa: F401  (checks each step of Horovod's optimizers)
    elastic,  # noqa: F401  (makes DeepReduce known to hvd.elastic.TorchState)
)
from hvd_deepreduce.torch.horovod import DeepReduce
from hvd_deepreduce.torch.local_sgd import LocalSGD

__all__ = ["DeepReduce", "LocalSGD"]
