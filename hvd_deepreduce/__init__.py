"""Gradient compression for stock Horovod: ``compression=DeepReduce(...)`` sends a few percent of the bytes."""

from hvd_deepreduce.codecs.sparse_tensor import SparseTensor
from hvd_deepreduce.config import Config, ConfigError
from hvd_deepreduce.wire.standalone import ContainerError

__version__ = "0.1.0"
__all__ = ["Config", "ConfigError", "ContainerError", "SparseTensor", "__version__"]
