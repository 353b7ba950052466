"""The CPU operations: ctypes over the C ABI of ``kernels/cpu``; the GIL is released during every call.

Arrays are contiguous and one-dimensional. An operation that reads a section from the wire raises ``ValueError`` with
a sentence where the section cannot be what an encoder wrote; it never reads or writes outside its arrays.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_double, c_int, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
F32 = NDArray[np.float32]
Floats = NDArray[np.floating[Any]]


def _load() -> ctypes.CDLL:
    found = sorted(Path(__file__).parent.parent.glob("_cpu*.so"))
    if not found:
        raise ImportError(
            "hvd_deepreduce has no compiled CPU kernels (_cpu*.so) beside it: install the package with 'pip install .', "
            "which needs a C++17 compiler"
        )
    return ctypes.CDLL(str(found[0]))


_LIBRARY = _load()
_CODES = {
    "p": c_void_p,
    "u": c_uint32,
    "U": c_uint64,
    "i": c_int,
    "I": c_int64,
    "d": c_double,
    "s": c_char_p,
    "*": POINTER(c_uint64),
    "v": None,
}


def function(name: str, result: str, arguments: str) -> Any:
    """The kernel ``dr_<name>``; ``result`` and ``arguments`` are letters of ``_CODES``."""
    kernel = getattr(_LIBRARY, f"dr_{name}")
    kernel.restype = _CODES[result]
    kernel.argtypes = [_CODES[letter] for letter in arguments]
    return kernel


def address(array: NDArray[Any]) -> int:
    """Where a contiguous array's data begins."""
    if not array.flags.c_contiguous:
        raise ValueError("a kernel was given an array that is not contiguous: pass numpy.ascontiguousarray(array)")
    return array.__array_interface__["data"][0]


_REASONS = {
    -1: "it ends before its last element",
    -2: "an index is out of order or not below the number of elements",
    -3: "a value's code or norm is out of range",
}


def check(result: int) -> None:
    """Raises ``ValueError`` with the sentence of a kernel's negative result."""
    if result < 0:
        raise ValueError(_REASONS.get(result, f"the kernel answered {result}"))


def _typed(name: str, result: str, arguments: str) -> dict[np.dtype[Any], Any]:
    return {
        np.dtype(np.float32): function(f"{name}_f32", result, arguments),
        np.dtype(np.float64): function(f"{name}_f64", result, arguments),
    }


_finite = _typed("finite", "i", "pUi")
_add = _typed("add", "v", "ppUi")
_topk = _typed("topk", "i", "ppUUppi")
_threshold = _typed("threshold", "p", "ppUdi*")
_take = _typed("take", "v", "ppp")
_gather = _typed("gather", "v", "ppUp")
_settle = _typed("settle", "v", "ppUp")
_sum = _typed("sum", "v", "pUpppidi")
_pack = {1: function("pack8", "v", "pUup"), 4: function("pack32", "v", "pUup")}
_unpack = {1: function("unpack8", "I", "pUUup"), 4: function("unpack32", "I", "pUUup")}
_check_indices = function("check_indices", "I", "pUU")
_bitmap_encode = function("bitmap_encode", "v", "pUp")
_bitmap_decode = function("bitmap_decode", "I", "pUUUp")
_rice_parameter = function("rice_parameter", "u", "pUU*")
_rice_encode = function("rice_encode", "v", "pUup")
_rice_decode = function("rice_decode", "I", "pUUuUp")
_qsgd_encode = function("qsgd_encode", "v", "pUUuiuuuupp")
_qsgd_decode = function("qsgd_decode", "I", "ppUUup")
_checksum = function("checksum", "u", "pU")
_random_indices = function("random_indices", "v", "UUuuup")
vector_level = function("vector_level", "i", "")


def finite(x: Floats, threads: int = 1) -> bool:
    """Whether no element of ``x`` (float32 or float64) is NaN or infinite."""
    return bool(_finite[x.dtype](address(x), x.size, threads))


def add(dense: Floats, gradient: Floats, threads: int = 1) -> None:
    """``dense += gradient``."""
    _add[dense.dtype](address(dense), address(gradient), dense.size, threads)


def topk(dense: Floats, gradient: Floats | None, k: int, threads: int = 1) -> tuple[U32, Floats]:
    """``dense += gradient``, then its k largest magnitudes: sorted indices and values. Ties: the lower index."""
    indices, values = np.empty(k, np.uint32), np.empty(k, dense.dtype)
    source = None if gradient is None else address(gradient)
    if _topk[dense.dtype](address(dense), source, dense.size, k, address(indices), address(values), threads):
        raise MemoryError(f"top-k of {dense.size} elements found no memory for its candidates")
    return indices, values


def threshold(dense: Floats, gradient: Floats | None, least: float, threads: int = 1) -> tuple[U32, Floats]:
    """``dense += gradient``, then every element with ``|x| >= least`` and ``x != 0``: sorted indices and values."""
    count = c_uint64()
    source = None if gradient is None else address(gradient)
    found = _threshold[dense.dtype](address(dense), source, dense.size, least, threads, byref(count))
    if not found:
        raise MemoryError(f"the threshold selection of {dense.size} elements found no memory for what it keeps")
    indices, values = np.empty(count.value, np.uint32), np.empty(count.value, dense.dtype)
    _take[dense.dtype](found, address(indices), address(values))
    return indices, values


def gather(dense: Floats, indices: U32) -> Floats:
    """``dense[indices]``."""
    values = np.empty(indices.size, dense.dtype)
    _gather[dense.dtype](address(dense), address(indices), indices.size, address(values))
    return values


def settle(dense: Floats, indices: U32, values: Floats) -> None:
    """``dense[indices] -= values``."""
    values = np.ascontiguousarray(values, dense.dtype)
    _settle[dense.dtype](address(dense), address(indices), indices.size, address(values))


def sum_into(out: Floats, parts: list[tuple[U32 | None, Floats]], scale: float, threads: int = 1) -> None:
    """``out = scale * sum of parts``, in their order; a part is (indices, values), or (None, dense values)."""
    kept = [(i, np.ascontiguousarray(v, out.dtype)) for i, v in parts]
    indices = np.array([0 if i is None else address(i) for i, _ in kept], np.uint64)
    values = np.array([address(v) for _, v in kept], np.uint64)
    counts = np.array([v.size for _, v in kept], np.uint64)
    _sum[out.dtype](
        address(out), out.size, address(indices), address(values), address(counts), len(kept), scale, threads
    )


def pack(values: NDArray[Any], width: int) -> U8:
    """Fields of ``width`` bits, one behind the other; ``values`` are uint8 (width <= 8) or uint32 (width <= 32)."""
    out = np.empty((values.size * width + 7) // 8, np.uint8)
    _pack[values.itemsize](address(values), values.size, width, address(out))
    return out


def unpack(section: U8, count: int, width: int, dtype: type[np.unsignedinteger[Any]]) -> NDArray[Any]:
    """The first ``count`` fields of ``pack``."""
    if section.size < (count * width + 7) // 8:  # before an array of that size is allocated
        check(-1)
    values = np.empty(count, dtype)
    check(_unpack[values.itemsize](address(section), section.size, count, width, address(values)))
    return values


def check_indices(indices: U32, numel: int) -> None:
    """``ValueError`` where the indices are not strictly increasing or not below ``numel``."""
    check(_check_indices(address(indices), indices.size, numel))


def bitmap_encode(indices: U32, numel: int) -> U8:
    """``numel`` bits, set at the indices."""
    out = np.zeros((numel + 7) // 8, np.uint8)
    _bitmap_encode(address(indices), indices.size, address(out))
    return out


def bitmap_decode(section: U8, numel: int, count: int) -> U32:
    """The indices of ``bitmap_encode``."""
    indices = np.empty(count, np.uint32)
    check(_bitmap_decode(address(section), section.size, numel, count, address(indices)))
    return indices


def rice_encode(indices: U32, numel: int) -> U8:
    """The section drawn in kernels/cpu/rice.cpp."""
    highs = c_uint64()
    b = _rice_parameter(address(indices), indices.size, numel, byref(highs))
    high_bits = highs.value + indices.size
    out = np.empty(1 + (indices.size * b + 7) // 8 + (high_bits + 7) // 8, np.uint8)
    out[0] = b
    _rice_encode(address(indices), indices.size, b, address(out) + 1)
    return out


def rice_decode(section: U8, numel: int, count: int) -> U32:
    """The indices of ``rice_encode``."""
    if section.size == 0 or section.size * 8 < count:
        check(-1)
    indices = np.empty(count, np.uint32)
    check(_rice_decode(address(section) + 1, section.size - 1, count, int(section[0]), numel, address(indices)))
    return indices


def qsgd_encode(
    values: F32, bucket: int, levels: int, l2: bool, seed: int, parameter: int, step: int, rank: int
) -> tuple[F32, U8]:
    """A norm a bucket, and codes 0 .. 2 * levels, rounded with the random numbers of (seed, parameter, step, rank)."""
    norms, codes = np.empty(-(-values.size // bucket), np.float32), np.empty(values.size, np.uint8)
    _qsgd_encode(
        address(values), values.size, bucket, levels, l2, seed, parameter, step, rank, address(norms), address(codes)
    )
    return norms, codes


def qsgd_decode(norms: F32, codes: U8, bucket: int, levels: int) -> F32:
    """The values of ``qsgd_encode``."""
    values = np.empty(codes.size, np.float32)
    check(_qsgd_decode(address(codes), address(norms), codes.size, bucket, levels, address(values)))
    return values


def checksum(data: U8) -> int:
    """The checksum of a container (whole 32-bit words), its own place left out."""
    return int(_checksum(address(data), data.size))


def random_indices(numel: int, count: int, seed: int, parameter: int, step: int) -> U32:
    """``count`` distinct sorted indices below ``numel``, the same wherever the key is the same."""
    indices = np.empty(count, np.uint32)
    _random_indices(numel, count, seed, parameter, step, address(indices))
    return indices
