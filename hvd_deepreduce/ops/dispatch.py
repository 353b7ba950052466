"""Operations: one signature, an implementation for the host and one for the GPU, selected by the type of an array."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import numpy as np

P = ParamSpec("P")
R = TypeVar("R")

OPERATIONS: dict[str, Operation[..., Any]] = {}
"""All operations, by ``"<module>.<name>"``."""


def on_host(array: Any) -> bool:
    """Whether ``array`` is a NumPy array. A list or tuple is on the host if all of its arrays are."""
    if isinstance(array, list | tuple):
        return all(on_host(each) for each in array)
    return array is None or isinstance(array, np.ndarray)


class Operation(Generic[P, R]):
    """A function with one implementation for NumPy arrays and one for arrays on a GPU.

    The positional argument at ``position`` selects the implementation: an array, or a list or tuple of arrays. A slice
    stands for several arguments.

    Attributes:
        host: the implementation for NumPy arrays. It has the public signature and docstring.
        device: the implementation for arrays on a GPU, set by ``cuda``.
    """

    def __init__(self, host: Callable[P, R], position: int | slice) -> None:
        self.host = host
        self.device: Callable[P, R] | None = None
        self.position = position
        functools.update_wrapper(self, host)
        self.name = f"{host.__module__.rsplit('.', 1)[-1]}.{host.__name__}"
        OPERATIONS[self.name] = self

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        array = args[self.position]
        if isinstance(array, np.ndarray) or on_host(array):
            return self.host(*args, **kwargs)
        assert self.device is not None, f"{self.name} has no implementation for arrays on a GPU"
        return self.device(*args, **kwargs)

    def cuda(self, implementation: Callable[P, R]) -> Callable[P, R]:
        """Decorator: the implementation for arrays on a GPU. mypy checks that its signature is the public one."""
        self.device = implementation
        return implementation


def operation(position: int | slice = 0) -> Callable[[Callable[P, R]], Operation[P, R]]:
    """Decorator: the function is an operation, and its implementation for NumPy arrays.

    Args:
        position: the positional argument, or several, whose type selects the implementation.
    """

    def decorate(host: Callable[P, R]) -> Operation[P, R]:
        return Operation(host, position)

    return decorate
