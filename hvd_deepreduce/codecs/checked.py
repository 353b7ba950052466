"""What codecs of other packages return is checked here: native code takes indices and values as they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import getattr_static, signature
from typing import Any

import numpy as np

from hvd_deepreduce.ops import bits


def check_array(what: str, given: Any, dtypes: tuple[Any, ...], size: int | None = None) -> None:
    """
    Args:
        size: elements that it must have; None: any number.

    Raises:
        ValueError: this is no array of one dimension, with one of these dtypes and so many elements, on the host or on
            a GPU.
    """
    dtype = getattr(given, "dtype", None)
    shape: tuple[int, ...] = getattr(given, "shape", ())
    if dtype not in dtypes or len(shape) != 1 or size not in (None, shape[0]):
        found = type(given).__name__ if dtype is None else f"{dtype}{list(shape)}"
        needed = " or ".join(str(np.dtype(one)) for one in dict.fromkeys(dtypes))
        raise ValueError(f"{what} is {found}; it must be an array {needed} [{'any' if size is None else size}]")


def check_support(what: str, given: Any, numel: int, count: int | None = None) -> None:
    """Raises ``ValueError`` if these are not strictly increasing indices, uint32 ``[count]``, below ``numel``."""
    check_array(what, given, (np.uint32,), count)
    try:
        bits.check_indices(given, numel)
    except ValueError as error:
        raise ValueError(f"{what} cannot be used: {error}") from None


def _selection(what: str, given: dict[str, Any], found: Any) -> None:
    dense, (indices, values) = given["dense"], _pair(what, found)
    if indices is not None:
        check_support(f"the indices that {what}", indices, dense.size)
    size = dense.size if indices is None else indices.size
    check_array(f"the values that {what}", values, (dense.dtype,), size)
    if isinstance(values, np.ndarray) and np.may_share_memory(values, dense):
        raise ValueError(f"the values that {what} are memory of the vector that it was given: return a copy")


def _support(what: str, given: dict[str, Any], found: Any) -> None:
    check_support(f"the support that {what}", found, given["numel"], given["count"])


def _section_and_support(what: str, given: dict[str, Any], found: Any) -> None:
    section, support = _pair(what, found)
    check_array(f"the section that {what}", section, (np.uint8,))
    if support is not None or given["indices"] is not None:
        check_support(f"the support that {what}", support, given["numel"])


def _section_and_order(what: str, given: dict[str, Any], found: Any) -> None:
    section, order = _pair(what, found)
    check_array(f"the section that {what}", section, (np.uint8,))
    if order is not None:
        check_array(f"the order that {what}", order, (np.uint32,), given["values"].size)
        bits.check_order(order)


def _values(what: str, given: dict[str, Any], found: Any) -> None:
    check_array(f"the values that {what}", found, (np.float32, given["dtype"]), given["count"])


def _support_and_values(what: str, given: dict[str, Any], found: Any) -> None:
    support, values = _pair(what, found)
    if support is not None or not given["dense"]:
        _support(what, given, support)
    _values(what, given, values)


def _pair(what: str, found: Any) -> Any:
    if not isinstance(found, tuple) or len(found) != 2:
        raise ValueError(f"what {what} is {type(found).__name__}; it must be a tuple of two")
    return found


CHECKS: dict[str, dict[str, Callable[[str, dict[str, Any], Any], None]]] = {
    "sparsifier": {"select": _selection, "indices_of": _support},
    "index": {"encode": _section_and_support, "decode": _support},
    "value": {"encode": _section_and_order, "decode": _values},
    "joint": {"encode": _section_and_support, "decode": _support_and_values},
}
"""By kind and function."""


def guard(kind: str, base: type[Any], codec: type[Any]) -> None:
    """Lets the functions of a codec check what they return. They raise ``ValueError`` then, which names the codec.

    Args:
        base: the class that says what the functions get.

    Raises:
        ValueError: a function is not static, as that of ``base`` is.
    """
    for name, check in CHECKS.get(kind, {}).items():
        found, meant = getattr_static(codec, name), getattr_static(base, name)
        static = isinstance(meant, staticmethod)
        if static is not isinstance(found, staticmethod):
            how = "must be a @staticmethod: a receiver has" if static else "cannot be a @staticmethod: it needs"
            raise ValueError(f"{name}() of the {kind} codec {codec.name!r} {how} {'no' if static else 'its'} settings")
        function, meant = (one.__func__ if static else one for one in (found, meant))
        guarded = _guarded(function, meant, f"{name}() of the {kind} codec {codec.name!r} has returned", check)
        setattr(codec, name, staticmethod(guarded) if static else guarded)


def _guarded(
    function: Callable[..., Any], meant: Callable[..., Any], what: str,
    check: Callable[[str, dict[str, Any], Any], None],
) -> Callable[..., Any]:  # fmt: skip
    parameters = signature(meant)

    @wraps(function)
    def guarded(*given: Any, **named: Any) -> Any:
        found = function(*given, **named)
        check(what, parameters.bind(*given, **named).arguments, found)
        return found

    return guarded
