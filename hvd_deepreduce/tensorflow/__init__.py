"""TensorFlow, Keras: ``compression=DeepReduce(...)`` for ``DistributedGradientTape`` and ``DistributedOptimizer``."""

from hvd_deepreduce.tensorflow import _keras  # noqa: F401  (first: checks that Horovod can work with this Keras)
from hvd_deepreduce.tensorflow.checkpoint import SaveState
from hvd_deepreduce.tensorflow.horovod import DeepReduce

__all__ = ["DeepReduce", "SaveState"]
