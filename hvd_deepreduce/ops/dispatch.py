"""Operations: one signature, an implementation for the host and one for the GPU, selected by the type of an array."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import numpy as np
from numpy import ndarray

P = ParamSpec("P")
R = TypeVar("R")


class Operation(Protocol[P, R]):
    """A function with one implementation for NumPy arrays and one for arrays on a GPU.

    Attributes:
        name: ``"<module>.<function>"``.
        host: the implementation for NumPy arrays. It has the public signature and docstring.
        device: the implementation for arrays on a GPU.
    """

    name: str
    host: Callable[P, R]
    device: Callable[P, R]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    def cuda(self, implementation: Callable[P, R], /) -> Callable[P, R]:
        """Decorator: the implementation for arrays on a GPU. mypy checks that its signature is the public one."""


OPERATIONS: dict[str, Operation[..., Any]] = {}
"""All operations, by name."""


def on_host(array: Any) -> bool:
    """Whether ``array`` is a NumPy array or ``None``. A list or tuple is on the host if everything in it is."""
    if isinstance(array, list | tuple):
        return all(on_host(each) for each in array)
    return array is None or isinstance(array, np.ndarray)


def generic(function: Callable[P, R]) -> Operation[P, R]:
    """Decorator: the function is an operation, whose one implementation serves arrays of both kinds."""
    found = cast(Operation[P, R], function)
    found.host = found.device = function
    return _named(found)


def _named(found: Operation[P, R]) -> Operation[P, R]:
    found.name = f"{found.host.__module__.rsplit('.', 1)[-1]}.{found.host.__name__}"
    OPERATIONS[found.name] = found
    return found


def operation(position: int | slice = 0) -> Callable[[Callable[P, R]], Operation[P, R]]:
    """Decorator: the function is an operation, and its implementation for NumPy arrays.

    Args:
        position: the positional argument, or several, whose type selects the implementation: an array, or a list or
            tuple of arrays. It must be passed by position.
    """

    def decorate(host: Callable[P, R]) -> Operation[P, R]:
        # Closures, and the usual case first: codecs call two dozen operations for a small tensor.
        if isinstance(position, slice):

            @functools.wraps(host)
            def call(*args: Any, **kwargs: Any) -> Any:
                for array in args[position]:
                    if type(array) is not ndarray and not on_host(array):
                        return found.device(*args, **kwargs)
                return host(*args, **kwargs)
        else:

            @functools.wraps(host)
            def call(*args: Any, **kwargs: Any) -> Any:
                array = args[position]
                if type(array) is ndarray or on_host(array):
                    return host(*args, **kwargs)
                return found.device(*args, **kwargs)

        def cuda(implementation: Callable[P, R]) -> Callable[P, R]:
            found.device = implementation
            return implementation

        found = cast(Operation[P, R], call)
        found.host, found.cuda = host, cuda  # type: ignore[method-assign]
        return _named(found)

    return decorate
