"""The compiled CPU kernels, through ctypes. The GIL is released during every call.

A kernel that reads a section from the wire returns a negative number if an encoder cannot have written the section;
``check`` turns it into a ``ValueError``. No kernel reads or writes outside its arrays.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, addressof, byref, c_char, c_char_p, c_double, c_float, c_int, c_int64, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_deepreduce.resources import digest_of_kernels, folder


class NonFiniteError(ValueError):
    """A gradient contains NaN or infinity, so it must be sent uncompressed."""


NOT_FINITE = -7
"""What kernels return then."""
BUILD = (
    "install the package with 'pip install .', or run 'python setup.py build_ext --inplace' in a checkout, which "
    "needs setuptools: pip install 'setuptools>=77'; both need a C++17 compiler"
)


def _load() -> ctypes.CDLL:
    # Exactly this name: earlier releases left libraries such as _cpu.cpython-310-x86_64-linux-gnu.so in a checkout.
    path = Path(__file__).parent.parent / "_cpu.so"
    if not path.exists():
        raise ImportError(f"the compiled CPU kernels are missing ({path}): {BUILD}")
    library, kernels = ctypes.CDLL(str(path)), folder("kernels")
    # A checkout's sources change while the library stays, and a function with other arguments would crash. An installed
    # package has the sources of its library inside.
    if kernels.parent != path.parent:
        made_of = getattr(library, "dr_sources", None)
        if made_of is not None:
            made_of.restype = c_char_p
        if made_of is None or made_of() != digest_of_kernels(kernels).encode():
            raise ImportError(
                f"the compiled CPU kernels ({path}) are of another release than their sources in {kernels}: {BUILD}"
            )
    return library


_LIBRARY = _load()
_char_at = c_char.from_buffer
"""Takes a third of the time of NumPy's own ways to an array's address, and an encode calls it two dozen times."""


def address(array: NDArray[Any]) -> int:
    """The address of a contiguous array's first element."""
    flags = array.flags
    if flags.carray and array.size:
        return addressof(_char_at(array.data))
    if not flags.c_contiguous:
        raise ValueError("a kernel was given an array that is not contiguous: pass numpy.ascontiguousarray(array)")
    if not flags.aligned:
        raise ValueError(
            f"a kernel was given an array of {array.dtype} that begins within an element's place in memory, as a view "
            "of bytes may: pass array.copy()"
        )
    pointer: int = array.__array_interface__["data"][0]
    return pointer


class _Pointer:
    """The type of a kernel's argument: an array, of which the kernel gets the address, or null for ``None``."""

    @staticmethod
    def from_param(array: NDArray[Any] | None) -> Any:
        if array is None:
            return None
        if array.flags.carray and array.size:
            return byref(_char_at(array.data))
        return c_void_p(address(array))


_CODES = {
    "p": _Pointer,
    "P": c_void_p,
    "u": c_uint32,
    "U": ctypes.c_uint64,
    "i": c_int,
    "I": c_int64,
    "d": c_double,
    "f": c_float,
    "s": c_char_p,
    "*": POINTER(ctypes.c_uint64),
    "v": None,
}

Kernel = Callable[..., Any]


def kernel(name: str, result: str, arguments: str) -> Kernel:
    """The function ``dr_<name>`` of the library.

    Args:
        name: without its prefix.
        result: the letter of its result's type in ``_CODES``.
        arguments: the letters of its arguments' types.

    Raises:
        ImportError: the library does not have it.
    """
    try:
        function = getattr(_LIBRARY, f"dr_{name}")
    except AttributeError:
        raise ImportError(
            f"the compiled CPU kernels ({_LIBRARY._name}) have no {name}, so they are of another release: {BUILD}"
        ) from None
    function.restype = _CODES[result]
    function.argtypes = [_CODES[letter] for letter in arguments]
    found: Kernel = function
    return found


def kernels_by_dtype(name: str, result: str, arguments: str) -> dict[np.dtype[Any], Kernel]:
    """The functions ``dr_<name>_f32`` and ``dr_<name>_f64``, by dtype. Another dtype is a ``TypeError``."""
    return _ByDtype({
        np.dtype(np.float32): kernel(f"{name}_f32", result, arguments),
        np.dtype(np.float64): kernel(f"{name}_f64", result, arguments),
    })  # fmt: skip


class _ByDtype(dict[np.dtype[Any], Kernel]):
    def __missing__(self, dtype: np.dtype[Any]) -> Kernel:
        raise TypeError(f"an array is {dtype}; float32 or float64 is needed, in this machine's order of bytes")


_REASONS = {
    -1: "it ends before its last element",
    -2: "an index is out of order or not below the number of elements",
    -3: "a code or a norm is out of range, or something other than zeros follows its last element",
    -4: "the mean of a bucket is not finite, has the wrong sign, or is out of the order of magnitudes",
    -5: "the sizes of its groups do not add up to its elements and bytes",
    -6: "its checksum does not match its bytes, so they were altered on the way",
    -7: "a value is not finite",
    -8: "the order is not a permutation of the values",
    -9: "a byte between its sections is not zero",
}


def check(result: int) -> None:
    """Raises ``ValueError`` for the negative result of a kernel."""
    if result < 0:
        raise ValueError(_REASONS.get(result, f"the kernel returned the unknown error {result}"))


def check_size(section: Any, size: int) -> None:
    """Raises ``ValueError`` if the section does not have ``size`` bytes."""
    if section.size != size:
        raise ValueError(f"it must have {size} bytes, and it has {section.size}")


def check_room(section: Any, bits: int) -> None:
    """Raises ``ValueError`` if the section has fewer bits, before arrays for its elements are allocated."""
    if 8 * section.size < bits:
        check(-1)


vector_level = kernel("vector_level", "i", "")
