"""PyTorch: ``compression=DeepReduce(model, ...)`` for ``horovod.torch.DistributedOptimizer``."""

from hvd_deepreduce.torch.horovod import DeepReduce

__all__ = ["DeepReduce"]
