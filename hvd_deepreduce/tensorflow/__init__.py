"""TensorFlow, Keras: ``compression=DeepReduce(...)`` for ``DistributedGradientTape`` and ``DistributedOptimizer``;
``LocalSGD``, which exchanges updates in place of gradients; and ``Capture``, which records gradients."""

from hvd_deepreduce.needs import needed

with needed("hvd_deepreduce.tensorflow"):
    from hvd_deepreduce.tensorflow import _keras  # noqa: F401  (first: checks the Keras)
    from hvd_deepreduce.tensorflow.capture import Capture
    from hvd_deepreduce.tensorflow.checkpoint import SaveState
    from hvd_deepreduce.tensorflow.horovod import DeepReduce
    from hvd_deepreduce.tensorflow.local_sgd import LocalSGD

__all__ = ["Capture", "DeepReduce", "LocalSGD", "SaveState"]
