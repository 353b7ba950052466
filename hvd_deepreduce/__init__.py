"""Gradient compression for stock Horovod: ``compression=DeepReduce(...)`` sends a few percent of the bytes."""

from hvd_deepreduce.config import Config, ConfigError
from hvd_deepreduce.container import ContainerError
from hvd_deepreduce.sparse import SparseTensor

__version__ = "0.1.0"
__all__ = ["Config", "ConfigError", "ContainerError", "SparseTensor", "__version__"]
