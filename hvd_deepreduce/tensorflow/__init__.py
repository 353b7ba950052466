"""TensorFlow, Keras: ``compression=DeepReduce(...)`` for ``DistributedGradientTape`` and ``DistributedOptimizer``."""

from hvd_deepreduce.tensorflow import _keras  # noqa: F401  (first of all: is it a Keras that Horovod can work with?)
from hvd_deepreduce.tensorflow.horovod import DeepReduce, SaveState

__all__ = ["DeepReduce", "SaveState"]
