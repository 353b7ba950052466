"""Errors within TensorFlow's operations, as Horovod Elastic needs them.

After an ``UnknownError`` whose text names an operation of Horovod, as that of a lost rank does, ``hvd.elastic.run`` of
Horovod 0.28.1 for TensorFlow goes back to the last commit. It drops all others, as if the training had ended. So our
operations have such names, and what is no lost rank is no ``UnknownError``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import tensorflow as tf

OF_HOROVOD = "HorovodAllreduce"
"""In the names of operations that wait for other ranks; also in kernels/tensorflow/operations.cpp."""


class StepError(ValueError):  # of which TensorFlow makes an InvalidArgumentError
    """An error of DeepReduce within an operation."""


def told(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, whose errors end a job unless a rank is lost."""

    @wraps(function)
    def call(*given: Any) -> Any:
        try:
            return function(*given)
        except (ValueError, TypeError, MemoryError):
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if "UnknownError" in text and OF_HOROVOD in text:
                raise
            raise StepError(text) from error

    return call


def numpy_function(function: Callable[..., Any], inputs: Any, types: Any, name: str) -> Any:
    """As ``tf.numpy_function``."""
    return tf.numpy_function(told(function), inputs, types, name=name)
