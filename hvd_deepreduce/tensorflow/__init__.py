"""TensorFlow, Keras: ``compression=DeepReduce(...)`` for ``DistributedGradientTape`` and ``DistributedOptimizer``; and
``LocalSGD``, which exchanges updates in place of gradients."""

from hvd_deepreduce.tensorflow import _keras  # noqa: F401  (first: checks that Horovod can work with this Keras)
from hvd_deepreduce.tensorflow.checkpoint import SaveState
from hvd_deepreduce.tensorflow.horovod import DeepReduce
from hvd_deepreduce.tensorflow.local_sgd import LocalSGD

__all__ = ["DeepReduce", "LocalSGD", "SaveState"]
