"""The CPU operations: ctypes over the C ABI of ``kernels/cpu``; the GIL is released during every call.

Arrays are contiguous and one-dimensional. An operation that reads a section from the wire raises ``ValueError`` with
a sentence where the section cannot be what an encoder wrote; it never reads or writes outside its arrays.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from ctypes import POINTER, byref, c_char_p, c_double, c_float, c_int, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
F32 = NDArray[np.float32]
Floats = NDArray[np.floating[Any]]
R = TypeVar("R")


class NotFinite(ValueError):
    """A gradient has NaN or infinity: it must be sent as it is."""


def _load() -> ctypes.CDLL:
    path = Path(__file__).parent.parent / "_cpu.so"
    if not path.exists():
        raise ImportError(
            f"the compiled CPU kernels are missing ({path}): install the package with 'pip install .', or run "
            "'python setup.py build_ext --inplace' in a checkout; both need a C++17 compiler"
        )
    return ctypes.CDLL(str(path))


_LIBRARY = _load()
_CODES = {
    "p": c_void_p,
    "u": c_uint32,
    "U": c_uint64,
    "i": c_int,
    "I": c_int64,
    "d": c_double,
    "f": c_float,
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
    if array.flags.writeable and array.size:
        # A third of the time of the ways that NumPy has; an encode asks two dozen times.
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
    pointer: int = array.__array_interface__["data"][0]
    return pointer


_REASONS = {
    -1: "it ends before its last element",
    -2: "an index is out of order or not below the number of elements",
    -3: "a value's code or norm is out of range",
    -4: "a bucket's mean is not finite, has the wrong sign or is out of the order of magnitudes",
    -5: "the groups' sizes do not add up to its elements and bytes",
    -6: "its checksum does not fit its bytes: they were altered on the way",
    -7: "a value is not finite",
    -8: "the order is not a permutation of the values",
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
_gather[np.dtype(np.uint32)] = _gather[np.dtype(np.float32)]  # it moves words
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
_qsgd_norms = function("qsgd_norms", "v", "pUUip")
_qsgd_codes = function("qsgd_codes", "v", "pUUuuuuupp")
_qsgd_decode = function("qsgd_decode", "I", "ppUUup")
_checksum = function("checksum", "u", "pU")
_random_indices = function("random_indices", "i", "UUuuup")
_bloom_insert = function("bloom_insert", "v", "pUuuuupU")
_bloom_query = function("bloom_query", "U", "pUuuuuUp")
_bloom_conflict_sets = function("bloom_conflict_sets", "i", "pUUuuuuUp")
_block_norms = _typed("block_norms", "v", "ppUUipi")
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


def scatter(values: Floats, places: U32) -> Floats:
    """``out`` with ``out[places] = values``; the places are a permutation."""
    out = np.empty_like(values)
    out[places] = values
    return out


def settle(dense: Floats, indices: U32 | None, values: Floats) -> None:
    """``dense[indices] -= values``; None: all of it."""
    if indices is None:
        dense -= values
        return
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


def exactly(section: U8, size: int) -> None:
    """``ValueError`` where a section has not ``size`` bytes."""
    if section.size != size:
        raise ValueError(f"it takes {size} bytes, and {section.size} are there")


def pack(values: NDArray[Any], width: int) -> U8:
    """Fields of ``width`` bits, one behind the other; ``values`` are uint8 (width <= 8) or uint32 (width <= 32)."""
    out = np.empty((values.size * width + 7) // 8, np.uint8)
    _pack[values.itemsize](address(values), values.size, width, address(out))
    return out


def unpack(section: U8, count: int, width: int, dtype: type[np.unsignedinteger[Any]]) -> NDArray[Any]:
    """The ``count`` fields of ``pack``."""
    exactly(section, (count * width + 7) // 8)  # before an array of that size is allocated
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
    exactly(section, (numel + 7) // 8)
    indices = np.empty(count, np.uint32)
    check(_bitmap_decode(address(section), section.size, numel, count, address(indices)))
    return indices


def rice_encode(indices: U32, numel: int) -> U8:
    """The section drawn in kernels/rice/rice.cpp."""
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


def qsgd_norms(values: F32, bucket: int, l2: bool) -> F32:
    """The largest magnitude, or the l2 norm, of each bucket."""
    norms = np.empty(-(-values.size // bucket), np.float32)
    _qsgd_norms(address(values), values.size, bucket, l2, address(norms))
    return norms


def qsgd_codes(
    values: F32, norms: F32, bucket: int, levels: int, seed: int, parameter: int, step: int, rank: int
) -> U8:
    """Codes 0 .. 2 * levels, rounded with the random numbers of (seed, parameter, step, rank)."""
    codes = np.empty(values.size, np.uint8)
    _qsgd_codes(
        address(values), values.size, bucket, levels, seed, parameter, step, rank, address(norms), address(codes)
    )
    return codes


def qsgd_encode(
    values: F32, bucket: int, levels: int, l2: bool, seed: int, parameter: int, step: int, rank: int
) -> tuple[F32, U8]:
    """``qsgd_norms`` and their ``qsgd_codes``."""
    norms = qsgd_norms(values, bucket, l2)
    return norms, qsgd_codes(values, norms, bucket, levels, seed, parameter, step, rank)


def qsgd_section(
    header: bytes, values: F32, bucket: int, bits: int, l2: bool, seed: int, parameter: int, step: int, rank: int
) -> U8:
    """``| header | norms | codes of bits bits each |``."""
    levels = 2 ** (bits - 1) - 1
    norms, codes = qsgd_encode(values, bucket, levels, l2, seed, parameter, step, rank)
    return joined(header, norms, pack(codes, bits))


def qsgd_open(norms: F32, packed: U8, count: int, bucket: int, bits: int) -> F32:
    """The values of ``qsgd_section``."""
    return qsgd_decode(norms, unpack(packed, count, bits, np.uint8), bucket, 2 ** (bits - 1) - 1)


def qsgd_decode(norms: F32, codes: U8, bucket: int, levels: int) -> F32:
    """The values of ``qsgd_encode``."""
    values = np.empty(codes.size, np.float32)
    check(_qsgd_decode(address(codes), address(norms), codes.size, bucket, levels, address(values)))
    return values


# The quantizers of value/ternary, uniform, sign and natural, and joint/three_lc.
_bucket_sums = function("bucket_sums", "v", "pUUip")
_uniform_encode = {w: function(f"uniform_encode{8 * w}", "v", "pUUuuuupp") for w in (1, 2)}
_uniform_decode = {w: function(f"uniform_decode{8 * w}", "I", "ppUUp") for w in (1, 2)}
_signs = function("signs", "v", "pUp")
_sign_decode = function("sign_decode", "I", "ppUUp")
_natural_exponents = function("natural_exponents", "v", "pUuuuup")
_natural_decode = function("natural_decode", "I", "ppUp")
_trits_pack = function("trits_pack", "v", "pUp")
_trits_unpack = function("trits_unpack", "I", "pUp")
_three_lc_pack = function("three_lc_pack", "v", "pUfp")
_three_lc_unpack = function("three_lc_unpack", "I", "pUfp")
_zero_runs_encode = function("zero_runs_encode", "U", "pUp")
_zero_runs_decode = function("zero_runs_decode", "I", "pUUp")


def bucket_sums(values: F32, bucket: int, squares: bool) -> NDArray[np.float64]:
    """The sum of magnitudes, or of squares, of each bucket, in the order that kernels/quantize/quantize.cpp says."""
    sums = np.empty(-(-values.size // bucket), np.float64)
    _bucket_sums(address(values), values.size, bucket, squares, address(sums))
    return sums


def _sizes(count: int, bucket: int) -> NDArray[np.float64]:
    sizes = np.full(-(-count // bucket), float(bucket))
    sizes[-1:] = count - bucket * (sizes.size - 1)
    return sizes


def bucket_means(values: F32, bucket: int) -> F32:
    """The mean magnitude of each bucket."""
    return (bucket_sums(values, bucket, False) / _sizes(values.size, bucket)).astype(np.float32)


def clip_scales(scales: F32, values: F32, bucket: int, clip: float) -> F32:
    """Each bucket's scale, but at most ``clip`` standard deviations of its values from 0."""
    deviations = np.sqrt(bucket_sums(values, bucket, True) / _sizes(values.size, bucket))
    return np.minimum(scales, np.minimum(clip * deviations, np.finfo(np.float32).max).astype(np.float32))


def uniform_encode(
    values: F32, bucket: int, dtype: type[np.unsignedinteger[Any]], seed: int, parameter: int, step: int, rank: int
) -> tuple[F32, NDArray[Any]]:
    """Each bucket's least and largest value, and codes between them that use all of ``dtype`` (uint8 or uint16)."""
    ranges, codes = np.empty(2 * -(-values.size // bucket), np.float32), np.empty(values.size, dtype)
    _uniform_encode[codes.itemsize](
        address(values), values.size, bucket, seed, parameter, step, rank, address(ranges), address(codes)
    )
    return ranges, codes


def uniform_decode(ranges: F32, codes: NDArray[Any], bucket: int) -> F32:
    """The values of ``uniform_encode``."""
    values = np.empty(codes.size, np.float32)
    check(_uniform_decode[codes.itemsize](address(codes), address(ranges), codes.size, bucket, address(values)))
    return values


def signs(values: F32) -> U8:
    """One bit a value, set where it is below zero."""
    out = np.empty((values.size + 7) // 8, np.uint8)
    _signs(address(values), values.size, address(out))
    return out


def sign_decode(signs: U8, scales: F32, count: int, bucket: int) -> F32:
    """Each bucket's scale with the signs of ``signs``."""
    values = np.empty(count, np.float32)
    check(_sign_decode(address(signs), address(scales), count, bucket, address(values)))
    return values


def natural_exponents(values: F32, seed: int, parameter: int, step: int, rank: int) -> U8:
    """The float32 exponent field of the power of two that each magnitude is rounded to."""
    exponents = np.empty(values.size, np.uint8)
    _natural_exponents(address(values), values.size, seed, parameter, step, rank, address(exponents))
    return exponents


def natural_decode(signs: U8, exponents: U8) -> F32:
    """Powers of two with the signs of ``signs``."""
    values = np.empty(exponents.size, np.float32)
    check(_natural_decode(address(signs), address(exponents), exponents.size, address(values)))
    return values


def trits_pack(digits: U8) -> U8:
    """Digits 0, 1, 2, five to a byte, as drawn in kernels/three_lc/three_lc.cpp."""
    out = np.empty(-(-digits.size // 5), np.uint8)
    _trits_pack(address(digits), digits.size, address(out))
    return out


def trits_unpack(section: U8, count: int) -> U8:
    """The ``count`` digits of ``trits_pack``."""
    if section.size != -(-count // 5):  # before an array of that size is allocated
        check(-1)
    digits = np.empty(count, np.uint8)
    check(_trits_unpack(address(section), count, address(digits)))
    return digits


def three_lc_pack(values: F32, m: float) -> U8:
    """``trits_pack`` of round(value / m) + 1."""
    out = np.empty(-(-values.size // 5), np.uint8)
    _three_lc_pack(address(values), values.size, m, address(out))
    return out


def three_lc_unpack(section: U8, count: int, m: float) -> F32:
    """-m, 0 or m for each digit; ``section`` has ceil(count / 5) bytes."""
    values = np.empty(count, np.float32)
    check(_three_lc_unpack(address(section), count, m, address(values)))
    return values


def zero_runs_encode(packed: U8) -> U8:
    """Packed digits, their runs of zeros in a byte each."""
    out = np.empty(packed.size, np.uint8)
    return out[: _zero_runs_encode(address(packed), packed.size, address(out))]


def zero_runs_decode(section: U8, count: int) -> U8:
    """The ``count`` bytes of ``zero_runs_encode``."""
    if section.size * 14 < count:  # before an array of that size is allocated
        check(-1)
    out = np.empty(count, np.uint8)
    check(_zero_runs_decode(address(section), section.size, count, address(out)))
    return out


def checksum(data: U8) -> int:
    """The checksum of a container (whole 32-bit words), its own place left out."""
    return int(_checksum(address(data), data.size))


def check_container(data: U8) -> None:
    """``ValueError`` where a container's checksum is not the one in its header."""
    if checksum(data) != int.from_bytes(data.data[CHECKSUM_AT : CHECKSUM_AT + 4], "little"):
        check(-6)


def random_indices(numel: int, count: int, seed: int, parameter: int, step: int, like: Any = None) -> U32:
    """``count`` distinct sorted indices below ``numel``, the same wherever the key is the same; ``like`` tells the
    backend."""
    indices = np.empty(count, np.uint32)
    if _random_indices(numel, count, seed, parameter, step, address(indices)):
        raise MemoryError(f"a random choice out of {numel} elements found no memory for one bit each")
    return indices


_quantile_encode = function("quantile_encode", "u", "pUuippp")
_quantile_decode = function("quantile_decode", "I", "pUpup")
_sketch_group = function("sketch_group", "v", "ppUppuppp")
_sketch_insert = function("sketch_insert", "v", "ppUuuuuuup")
_sketch_query = function("sketch_query", "I", "pUuuuuuuppp")
_flagged_bound = function("flagged_bound", "U", "U")
_flagged_encode = function("flagged_encode", "U", "pUp")
_flagged_decode = function("flagged_decode", "I", "pUUUp")
_sketch_merge = function("sketch_merge", "I", "ppUUpp")
_sketch_bound = function("sketch_bound", "U", "sU")
_sketch_encode = function("sketch_encode", "U", "ppUuuuip")
_sketch_decode = function("sketch_decode", "I", "pUUUuuuipp")


def quantile_encode(values: F32, buckets: int, middle: bool) -> tuple[F32, U32, int]:
    """The means of up to ``buckets`` quantile buckets, each value's bucket, and how many buckets are of negative
    values; ordered as drawn in kernels/sketch/quantile.cpp. At least one value."""
    means, codes, negative = np.empty(buckets, np.float32), np.empty(values.size, np.uint32), np.empty(1, np.uint32)
    found = _quantile_encode(
        address(values), values.size, buckets, middle, address(means), address(codes), address(negative)
    )
    if found == 0:
        raise MemoryError(f"the quantiles of {values.size} values found no memory")
    return means[:found], codes, int(negative[0])


def quantile_decode(means: F32, codes: U32) -> F32:
    """``means[codes]``."""
    values = np.empty(codes.size, np.float32)
    check(_quantile_decode(address(codes), codes.size, address(means), means.size, address(values)))
    return values


def sketch_group(indices: U32, codes: U32, group_of: U32, first: U32) -> tuple[U32, U32, U8]:
    """How many elements each group has; then keys and numbers (0 for a group's first bucket), group behind group, in
    their old order within each."""
    counts, keys = np.empty(first.size, np.uint32), np.empty(indices.size, np.uint32)
    numbers = np.empty(indices.size, np.uint8)
    _sketch_group(
        address(indices), address(codes), indices.size, address(group_of), address(first), first.size,
        address(counts), address(keys), address(numbers),
    )  # fmt: skip
    return counts, keys, numbers


def sketch_insert(
    keys: U32, numbers: U8, rows: int, columns: int, width: int, seed: int, parameter: int, step: int
) -> U8:
    """The bins, row behind row, of a MinMaxSketch of numbers below ``width``."""
    bins = np.empty(rows * columns, np.uint8)
    _sketch_insert(
        address(keys), address(numbers), keys.size, rows, columns, width, seed, parameter, step, address(bins)
    )
    return bins


def sketch_query(
    keys: U32, bins: U8, means: F32, rows: int, columns: int, seed: int, parameter: int, step: int
) -> F32:
    """The means of the numbers that the ``rows * columns`` bins hold for the keys, each what was inserted or less."""
    values = np.empty(keys.size, np.float32)
    check(
        _sketch_query(
            address(keys), keys.size, rows, columns, means.size, seed, parameter, step, address(bins), address(means),
            address(values),
        )
    )  # fmt: skip
    return values


def flagged_encode(keys: U32) -> U8:
    """The section of keys drawn at the end of kernels/sketch/sketch.cpp."""
    out = np.empty(_flagged_bound(keys.size), np.uint8)
    return out[: _flagged_encode(address(keys), keys.size, address(out))].copy()


def flagged_decode(section: U8, numel: int, count: int) -> U32:
    """The keys of ``flagged_encode``."""
    if section.size < count:
        check(-1)
    keys = np.empty(count, np.uint32)
    check(_flagged_decode(address(section), section.size, count, numel, address(keys)))
    return keys


def sketch_merge(keys: U32, values: F32, numel: int) -> tuple[U32, F32]:
    """The pairs sorted by key; the keys must differ and be below ``numel``."""
    sorted_keys, sorted_values = np.empty_like(keys), np.empty_like(values)
    result = _sketch_merge(
        address(keys), address(values), keys.size, numel, address(sorted_keys), address(sorted_values)
    )
    if result == 1:
        raise MemoryError(f"the merge of {keys.size} keys found no memory")
    check(result)
    return sorted_keys, sorted_values


def sketch_encode(
    header: bytes, means: F32, indices: U32, codes: U32, coded: bool, seed: int, parameter: int, step: int
) -> U8:
    """The section drawn in joint/minmax_sketch.py, of one element or more; ``coded`` as SKCompress has it."""
    tables = len(header) + means.nbytes
    section = np.empty(_sketch_bound(header, indices.size), np.uint8)
    section[: len(header)] = np.frombuffer(header, np.uint8)
    section[len(header) : tables] = means.view(np.uint8)
    size = _sketch_encode(
        address(indices), address(codes), indices.size, seed, parameter, step, coded, address(section)
    )
    if size == 0:
        raise MemoryError(f"the sketches of {indices.size} elements found no memory")
    if size == 1:
        raise ValueError(f"a group of {indices.size} elements takes 2^32 bytes or more: use more groups")
    return section[:size].copy()


def sketch_decode(
    section: U8, numel: int, count: int, coded: bool, seed: int, parameter: int, step: int
) -> tuple[U32, F32]:
    """Sorted keys and their values out of a section with a checked header, whose tables lie within it."""
    keys, values = np.empty(count, np.uint32), np.empty(count, np.float32)
    result = _sketch_decode(
        address(section), section.size, count, numel, seed, parameter, step, coded, address(keys), address(values)
    )
    if result == 1:
        raise MemoryError(f"the sketches of {count} elements found no memory")
    check(result)
    return keys, values


_stream_count = function("stream_count", "U", "pUu*")
_stream_encode = _typed("stream_encode", "v", "ppUuppp")
_stream_check = function("stream_check", "I", "ppUUUU")
_stream_indices = function("stream_indices", "v", "ppUp")
_stream_nonzero = _typed("stream_nonzero", "U", "ppUppp")
_stream_dense = _typed("stream_dense", "v", "ppUpUUp")
_stream_add = _typed("stream_add", "v", "ppUpp")
_stream_merge = _typed("stream_merge", "U", "pppUUpppUUuppp*")
_stream_split = function("stream_split", "v", "ppUpUpppp")
_stream_gaps = function("stream_gaps", "v", "ppUupp")
_stream_blocks = function("stream_blocks", "I", "ppUu")


def stream_encode(indices: U32, values: Floats, gap: int) -> tuple[U32, U32, Floats]:
    """Dense blocks of sorted indices: starts, lengths, and the values with the zeros inside blocks written out."""
    covered = c_uint64()
    blocks = _stream_count(address(indices), indices.size, gap, byref(covered))
    starts, lengths = np.empty(blocks, np.uint32), np.empty(blocks, np.uint32)
    out = np.empty(covered.value + gap, values.dtype)
    _stream_encode[values.dtype](
        address(indices), address(values), indices.size, gap, address(starts), address(lengths), address(out)
    )
    return starts, lengths, out[: covered.value]


def stream_check(starts: U32, lengths: U32, begin: int, end: int, count: int) -> None:
    """``ValueError`` where blocks are empty, overlap, are out of order, leave [begin, end) or do not hold ``count``."""
    if _stream_check(address(starts), address(lengths), starts.size, begin, end, count):
        raise ValueError(
            f"its blocks are empty, overlap, are out of order, leave the elements {begin} to {end} or do not hold "
            f"{count} values"
        )


def stream_indices(starts: U32, lengths: U32, count: int) -> U32:
    """The indices of the ``count`` elements that blocks cover."""
    indices = np.empty(count, np.uint32)
    _stream_indices(address(starts), address(lengths), starts.size, address(indices))
    return indices


def stream_nonzero(starts: U32, lengths: U32, values: Floats) -> tuple[U32, Floats]:
    """The indices and values of the covered elements that are not zero."""
    indices, out = np.empty(values.size + 1, np.uint32), np.empty(values.size + 1, values.dtype)
    found = _stream_nonzero[values.dtype](
        address(starts), address(lengths), starts.size, address(values), address(indices), address(out)
    )
    return indices[:found], out[:found]


def stream_dense(starts: U32, lengths: U32, values: Floats, begin: int, out: Floats) -> None:
    """``out`` = the elements from ``begin`` on, as many as it holds; no block may leave them."""
    _stream_dense[values.dtype](
        address(starts), address(lengths), starts.size, address(values), begin, begin + out.size, address(out)
    )


def stream_add(starts: U32, lengths: U32, values: Floats, dense: Floats) -> None:
    """``dense += the blocks``."""
    _stream_add[values.dtype](address(starts), address(lengths), starts.size, address(values), address(dense))


def stream_merge(a: tuple[U32, U32, Floats], b: tuple[U32, U32, Floats], gap: int) -> tuple[U32, U32, Floats]:
    """The sum of two streams (starts, lengths, values)."""
    blocks = a[0].size + b[0].size
    starts, lengths = np.empty(blocks, np.uint32), np.empty(blocks, np.uint32)
    out = np.empty(a[2].size + b[2].size + gap * (blocks + 1) + 4, a[2].dtype)
    count = c_uint64()
    made = _stream_merge[out.dtype](
        address(a[0]), address(a[1]), address(a[2]), a[0].size, a[2].size,
        address(b[0]), address(b[1]), address(b[2]), b[0].size, b[2].size,
        gap, address(starts), address(lengths), address(out), byref(count),
    )  # fmt: skip
    return starts[:made], lengths[:made], out[: count.value]


def stream_split(
    starts: U32, lengths: U32, cuts: NDArray[np.uint64]
) -> tuple[U32, U32, NDArray[np.uint64], NDArray[np.uint64]]:
    """New starts and lengths of the cut blocks, and where each of the ``cuts.size + 1`` pieces has its blocks and its
    values: piece p those from ``at[p]`` to ``at[p + 1]``."""
    room = starts.size + cuts.size
    out_starts, out_lengths = np.empty(room, np.uint32), np.empty(room, np.uint32)
    block_at, value_at = np.empty(cuts.size + 2, np.uint64), np.empty(cuts.size + 2, np.uint64)
    _stream_split(
        address(starts), address(lengths), starts.size, address(cuts), cuts.size,
        address(out_starts), address(out_lengths), address(block_at), address(value_at),
    )  # fmt: skip
    return out_starts, out_lengths, block_at, value_at


def stream_gaps(starts: U32, lengths: U32, begin: int) -> tuple[U32, U32]:
    """Starts and lengths as the two rows of increasing numbers that are rice-coded."""
    skips, ends = np.empty(starts.size, np.uint32), np.empty(starts.size, np.uint32)
    _stream_gaps(address(starts), address(lengths), starts.size, begin, address(skips), address(ends))
    return skips, ends


def stream_blocks(skips: U32, ends: U32, begin: int) -> None:
    """``stream_gaps`` undone in place: the first array becomes the starts, the second the lengths."""
    check(_stream_blocks(address(skips), address(ends), skips.size, begin))


_sort_values = function("sort_values", "v", "pUppp")
_fit_poly_encode = function("fit_poly_encode", "U", "pUuup")
_fit_poly_decode = function("fit_poly_decode", "I", "pUUp")
_fit_dexp_encode = function("fit_dexp_encode", "U", "pUp")
_fit_dexp_decode = function("fit_dexp_decode", "I", "pUUp")


def sort_values(values: F32) -> tuple[F32, U32]:
    """The values from the largest down, and where each stood; equal values (0 and -0 are) in the order they had."""
    ordered, order = np.empty(values.size, np.float32), np.empty(values.size, np.uint32)
    scratch = np.empty(2 * values.size, np.uint64)
    _sort_values(address(values), values.size, address(scratch), address(ordered), address(order))
    return ordered, order


def fit_poly_encode(ordered: F32, degree: int, segments: int | None) -> U8:
    """The section drawn in kernels/curve_fit/fit_poly.cpp, of ``sort_values``' first result."""
    most = min(segments or 1024, ordered.size // (degree + 1) + 1)
    section = np.empty(4 * (9 + 2 * (degree + 2) * most), np.uint8)
    words = _fit_poly_encode(address(ordered), ordered.size, degree, segments or 0, address(section))
    return section[: 4 * words]


def fit_poly_decode(section: U8, count: int) -> F32:
    """The sorted values of ``fit_poly_encode``, as fitted."""
    values = np.empty(count, np.float32)
    check(_fit_poly_decode(address(section), section.size, count, address(values)))
    return values


def fit_dexp_encode(ordered: F32) -> U8:
    """The section drawn in kernels/curve_fit/fit_dexp.cpp, of ``sort_values``' first result."""
    section = np.empty(4 * 14, np.uint8)
    words = _fit_dexp_encode(address(ordered), ordered.size, address(section))
    return section[: 4 * words]


def fit_dexp_decode(section: U8, count: int) -> F32:
    """The sorted values of ``fit_dexp_encode``, as fitted."""
    values = np.empty(count, np.float32)
    check(_fit_dexp_decode(address(section), section.size, count, address(values)))
    return values


def bloom_insert(indices: U32, size: int, hashes: int, seed: int, parameter: int, step: int) -> U8:
    """A Bloom filter of ``size`` bytes (8 to 2^29 - 1) that holds the indices."""
    bits = np.zeros(size + 8, np.uint8)
    _bloom_insert(address(indices), indices.size, hashes, seed, parameter, step, address(bits), size)
    return bits[:size]


def bloom_query(bits: U8, hashes: int, numel: int, seed: int, parameter: int, step: int) -> U32:
    """The positives: the indices below ``numel`` that the filter holds, falsely or not."""
    wrapped = np.concatenate([bits, bits[:8]])
    bitmap = np.empty(-(-numel // 64) * 8, np.uint8)
    found = _bloom_query(address(wrapped), bits.size, hashes, seed, parameter, step, numel, address(bitmap))
    return bitmap_decode(bitmap[: (numel + 7) // 8], numel, found)


def bloom_conflict_sets(
    positives: U32, count: int, size: int, hashes: int, seed: int, parameter: int, step: int
) -> U32:
    """Policy P2's ``count`` out of all the positives of a filter of ``size`` bytes."""
    chosen = np.empty(count, np.uint32)
    key = (seed, parameter, step)
    if _bloom_conflict_sets(address(positives), positives.size, count, hashes, *key, size, address(chosen)):
        raise MemoryError(f"the conflict sets of {positives.size} positives found no memory")
    return chosen


def block_norms(dense: Floats, gradient: Floats | None, block: int, l2: bool, threads: int = 1) -> Floats:
    """``dense += gradient``, then a float64 a block: its sum of squares, or of magnitudes."""
    norms = np.empty(-(-dense.size // block), np.float64)
    source = None if gradient is None else address(gradient)
    _block_norms[dense.dtype](address(dense), source, dense.size, block, l2, address(norms), threads)
    return norms


def of_blocks(blocks: U32, block: int, numel: int) -> U32:
    """The indices of all elements of sorted blocks; the last block of a tensor ends with it."""
    # In 64 bits: the last block may end beyond 2^32.
    indices = np.add.outer(blocks.astype(np.int64) * block, np.arange(min(block, numel))).ravel()
    return indices[: np.searchsorted(indices, numel)].astype(np.uint32)


_rans_bound = function("rans_bound", "U", "U")
_rans_encode = function("rans_encode", "U", "pUp")
_rans_decode = function("rans_decode", "I", "pUUp")
_huffman_bound = function("huffman_bound", "U", "U")
_huffman_encode = function("huffman_encode", "U", "pUp")
_huffman_decode = function("huffman_decode", "I", "pUUp")
_index_sizes = function("index_sizes", "v", "pUU*")
_delta_encode = function("delta_encode", "U", "pUp")
_delta_decode = function("delta_decode", "I", "pUUUpp")
_rle_encode = function("rle_encode", "U", "pUUp")
_rle_decode = function("rle_decode", "I", "pUUUp")
_elias_fano_bytes = function("elias_fano_bytes", "U", "pUU")
_elias_fano_encode = function("elias_fano_encode", "v", "pUUp")
_elias_fano_decode = function("elias_fano_decode", "I", "pUUUp")
_huffman_indices_encode = function("huffman_indices_encode", "U", "pUUp")
_huffman_indices_decode = function("huffman_indices_decode", "I", "pUUUp")
_rans_indices_encode = function("rans_indices_encode", "U", "pUpp*")
_rans_indices_decode = function("rans_indices_decode", "I", "pUUUpp")


def rans_encode(symbols: U8) -> U8:
    """The section of symbols drawn in kernels/rans/rans.cpp."""
    out = np.empty(_rans_bound(symbols.size), np.uint8)
    return out[_rans_encode(address(symbols), symbols.size, address(out)) :].copy()


def rans_decode(section: U8, count: int) -> U8:
    """The symbols of ``rans_encode``."""
    symbols = np.empty(count, np.uint8)
    check(_rans_decode(address(section), section.size, count, address(symbols)))
    return symbols


def huffman_encode(symbols: U8) -> U8:
    """The section of symbols drawn in kernels/huffman/huffman.cpp."""
    out = np.empty(_huffman_bound(symbols.size), np.uint8)
    return out[: _huffman_encode(address(symbols), symbols.size, address(out))].copy()


def huffman_decode(section: U8, count: int) -> U8:
    """The symbols of ``huffman_encode``."""
    symbols = np.empty(count, np.uint8)
    check(_huffman_decode(address(section), section.size, count, address(symbols)))
    return symbols


def index_sizes(indices: U32, numel: int) -> list[int]:
    """Bytes of the rice, rle, delta, elias_fano and rans sections of one index or more; estimates beyond 8192."""
    sizes = (c_uint64 * 5)()
    _index_sizes(address(indices), indices.size, numel, sizes)
    return list(sizes)


def delta_encode(keys: U32) -> U8:
    """The section of sorted unique keys drawn in kernels/delta/delta.cpp."""
    out = np.empty(5 * keys.size + 160, np.uint8)
    return out[: _delta_encode(address(keys), keys.size, address(out))].copy()


def delta_decode(section: U8, numel: int, count: int) -> U32:
    """The keys of ``delta_encode``, all below ``numel``."""
    if section.size * 4 < count:  # a key takes two bits or more
        check(-1)
    scratch, keys = np.empty(count, np.uint8), np.empty(count, np.uint32)
    check(_delta_decode(address(section), section.size, count, numel, address(scratch), address(keys)))
    return keys


def rle_encode(indices: U32, numel: int) -> U8:
    """The section drawn in kernels/rle/rle.cpp."""
    out = np.empty(16 * indices.size + 16, np.uint8)
    return out[: _rle_encode(address(indices), indices.size, numel, address(out))].copy()


def rle_decode(section: U8, numel: int, count: int) -> U32:
    """The indices of ``rle_encode``."""
    indices = np.empty(count, np.uint32)
    check(_rle_decode(address(section), section.size, count, numel, address(indices)))
    return indices


def elias_fano_encode(indices: U32, numel: int) -> U8:
    """The section drawn in kernels/elias_fano/elias_fano.cpp."""
    out = np.empty(_elias_fano_bytes(address(indices), indices.size, numel), np.uint8)
    _elias_fano_encode(address(indices), indices.size, numel, address(out))
    return out


def elias_fano_decode(section: U8, numel: int, count: int) -> U32:
    """The indices of ``elias_fano_encode``."""
    if section.size * 8 < count:
        check(-1)
    indices = np.empty(count, np.uint32)
    check(_elias_fano_decode(address(section), section.size, count, numel, address(indices)))
    return indices


def huffman_indices_encode(indices: U32, numel: int) -> U8:
    """The section of indices drawn in kernels/huffman/huffman.cpp."""
    out = np.empty(6 * indices.size + 8, np.uint8)
    return out[: _huffman_indices_encode(address(indices), indices.size, numel, address(out))].copy()


def huffman_indices_decode(section: U8, numel: int, count: int) -> U32:
    """The indices of ``huffman_indices_encode``."""
    indices = np.empty(count, np.uint32)
    check(_huffman_indices_decode(address(section), section.size, count, numel, address(indices)))
    return indices


def rans_indices_encode(indices: U32) -> U8:
    """The section drawn in kernels/rans/rans.cpp."""
    scratch, end = np.empty(indices.size, np.uint8), c_uint64()
    out = np.empty(_rans_bound(indices.size) + 4 * indices.size + 8, np.uint8)
    begin = _rans_indices_encode(address(indices), indices.size, address(scratch), address(out), byref(end))
    return out[begin : end.value].copy()


def rans_indices_decode(section: U8, numel: int, count: int) -> U32:
    """The indices of ``rans_indices_encode``."""
    scratch, indices = np.empty(count, np.uint8), np.empty(count, np.uint32)
    check(_rans_indices_decode(address(section), section.size, count, numel, address(scratch), address(indices)))
    return indices


# ---- What needs no kernel here, and one on a GPU.

CHECKSUM_AT = 12
"""Where a container keeps its checksum."""


HERE = nullcontext()


def encoding(gradient: Floats, residual: Floats | None, threads: int = 1) -> AbstractContextManager[None]:
    """Around the encoding of a gradient.

    Raises:
        NotFinite: it has NaN or infinity; the residual is as it was.
    """
    if not finite(gradient, threads):
        raise NotFinite
    return HERE


def reading(data: Any) -> AbstractContextManager[None]:
    """Around the decoding of an allgather's result."""
    return HERE


def together(work: Callable[[], R]) -> R:
    """``work()``, which decodes several containers."""
    return work()


def read_heads(data: U8, ranks: int) -> None:
    """Before the heads of the containers in ``data`` are asked for."""


def head(section: U8, size: int) -> bytes:
    """The first bytes of a section, for the host."""
    return section[:size].tobytes()


def host(array: NDArray[Any]) -> NDArray[Any]:
    """The array on the host."""
    return array


def put(array: NDArray[Any], like: Any = None) -> NDArray[Any]:
    """A host's array where ``like`` is."""
    return array


def zeros(count: int, dtype: Any, like: Any = None) -> NDArray[Any]:
    """``count`` zeros."""
    return np.zeros(count, dtype)


def empty(count: int, dtype: Any, like: Any = None) -> NDArray[Any]:
    """``count`` elements of any value."""
    return np.empty(count, dtype)


def arange(count: int, like: Any = None) -> U32:
    """0 to ``count - 1``."""
    return np.arange(count, dtype=np.uint32)


def aligned(data: U8) -> U8:
    """The bytes, at an address that whole words can be read from."""
    return data.copy() if data.__array_interface__["data"][0] % 8 else data


def concatenate(arrays: list[NDArray[Any]]) -> NDArray[Any]:
    """One array behind the other."""
    return np.concatenate(arrays)


def moved(indices: U32, by: int) -> U32:
    """``indices + by``."""
    return indices + np.uint32(by)


def joined(header: bytes, *arrays: NDArray[Any], pad: int = 1, checked: bool = False) -> U8:
    """Up to 64 bytes and up to four arrays, one behind the other, each filled with zeros to a multiple of ``pad``;
    ``checked``: with the checksum of a container."""
    begin = -(-len(header) // pad) * pad
    out = np.empty(begin + sum([-(-array.nbytes // pad) * pad for array in arrays]), np.uint8)
    bytes_of_out = out.data
    bytes_of_out[:begin] = header.ljust(begin, b"\0")
    for array in arrays:
        size = array.nbytes
        end = begin + size
        if size:
            out[begin:end] = array if array.dtype == np.uint8 else array.view(np.uint8)
        begin += -(-size // pad) * pad
        if end < begin:
            bytes_of_out[end:begin] = bytes(begin - end)
    if checked:
        bytes_of_out[CHECKSUM_AT : CHECKSUM_AT + 4] = checksum(out).to_bytes(4, "little")
    return out


def to_float32(values: Floats) -> F32:
    """The values in float32, those beyond its range at its ends; the same array where they are float32 already."""
    if values.dtype == np.float32:
        return np.ascontiguousarray(values, np.float32)
    limit = np.finfo(np.float32).max
    return np.clip(values, -limit, limit).astype(np.float32)


def to_bfloat16(values: F32) -> NDArray[np.uint16]:
    """The upper 16 bits of each float32, rounded to nearest, ties to even; never up to infinity."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where((rounded & 0x7FFF) == 0x7F80, rounded - 1, rounded).astype(np.uint16)


def half_encode(values: Floats, bfloat16: bool) -> U8:
    """The section of value/half.py."""
    section = np.zeros(values.size + 1, np.uint16)
    limit = np.finfo(np.float32 if bfloat16 else np.float16).max
    clipped = np.clip(values, -limit, limit).astype(np.float32)
    section[0] = bfloat16
    section[1:] = to_bfloat16(clipped) if bfloat16 else clipped.astype(np.float16).view(np.uint16)
    return section.view(np.uint8)


def half_decode(section: U8, count: int) -> F32:
    """The ``count`` values of ``half_encode``; ``section`` has 2 * (count + 1) bytes."""
    words = section.view(np.uint16)
    if words[0] > 1:
        raise ValueError(f"the 16-bit format is 0 (float16) or 1 (bfloat16), not {words[0]}")
    values: F32
    if words[0] == 0:
        values = words[1:].view(np.float16).astype(np.float32)
    else:
        values = (words[1:].astype(np.uint32) << 16).view(np.float32)
    check_finite(values)
    return values


def check_finite(values: Floats) -> None:
    """``ValueError`` where a value is NaN or infinite."""
    if not finite(values):
        check(-7)


def without(indices: U32, places: U32) -> U32:
    """What is left of the indices when those at distinct ``places`` are taken away."""
    return np.delete(indices, places)


def sort_indices(indices: U32) -> tuple[U32, U32]:
    """The indices in order, and where each stood."""
    places = np.argsort(indices, kind="stable").astype(np.uint32)
    return indices[places], places


def check_order(order: U32) -> None:
    """``ValueError`` where it is not a permutation."""
    seen = np.zeros(order.size, bool)
    if order.max(initial=0) < order.size:
        seen[order] = True
    if not seen.all():
        check(-8)
