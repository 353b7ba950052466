"""Arrays: element-wise arithmetic on dense float arrays, index lists, and where arrays are allocated.

A dense array is float32 or float64, contiguous and one-dimensional. Index lists are uint32. Where an operation adds a
gradient to a residual, a sum beyond the largest finite number becomes that number, since no codec takes infinity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_deepreduce.ops import bitmap, sections
from hvd_deepreduce.ops.deferred import check_selection, counter, generic_kernel, residual_guard, selection_guard
from hvd_deepreduce.ops.device import THREADS, allocate, array_module, for_each, grid, launch, scan_status, suffix
from hvd_deepreduce.ops.dispatch import generic, operation
from hvd_deepreduce.ops.library import address, kernels_by_dtype
from hvd_deepreduce.ops.types import F32, U8, U32, Device, Floats, f32, u32, u64

_FILE = "arrays/arrays"
_add = kernels_by_dtype("add", "v", "ppUi")
_gather = {w: generic_kernel(_FILE, f"gather_f{8 * w}", "v", "ppUp") for w in (4, 8)}
_subtract = kernels_by_dtype("subtract", "v", "ppUp")
_sum = kernels_by_dtype("sum", "v", "PUpppidi")
_copy_finite = kernels_by_dtype("copy_finite", "i", "PPUi")
_copy_finite_many = kernels_by_dtype("copy_finite_many", "i", "pppU")

SUM_PARTS = 8
"""Parts that one launch sums, as in kernels/arrays/arrays.cu."""
SUM_TILE = 2048
"""Elements that a block sums, as in kernels/arrays/sum.cuh."""


@operation()
def add(dense: Floats, gradient: Floats, threads: int = 1) -> None:
    """``dense += gradient``, in place.

    On a GPU, within ``deferred.encoding``, ``dense`` stays as it is if the encoded gradient is not finite.
    """
    _add[dense.dtype](dense, gradient, dense.size, threads)


@add.cuda
def _(dense: Device, gradient: Device, threads: int = 1) -> None:
    if dense.size:
        xp = array_module(dense)
        blocks, guard = grid(xp, dense.size, 4 * THREADS), residual_guard()
        launch(xp, _FILE, f"add_{suffix(dense.dtype)}", blocks, dense, gradient, dense.size, guard)


@operation()
def scale(dense: Floats, factor: float) -> None:
    """``dense *= factor``, in place; the factor is rounded to the dtype of ``dense``."""
    dense *= dense.dtype.type(factor)


@scale.cuda
def _(dense: Device, factor: float) -> None:
    if dense.size:
        xp, kernel = array_module(dense), f"scale_{suffix(dense.dtype)}"
        for_each(xp, _FILE, kernel, dense.size, dense, dense.size, dense.dtype.type(factor))


def copy_finite(to: int, source: int, numel: int, dtype: np.dtype[Any], threads: int = 1) -> bool:
    """Copies an array on the host. Returns whether all of its elements are finite, in the same pass over memory.

    It takes addresses, since a framework knows those of its tensors without making arrays of them.

    Args:
        to, source: addresses of contiguous arrays, float32 or float64 ``[numel]``.
    """
    return bool(_copy_finite[dtype](to, source, numel, threads))


def copy_finite_many(copies: Sequence[tuple[int, int, int]], dtype: np.dtype[Any]) -> bool:
    """As ``copy_finite``, for several small arrays in one call.

    Args:
        copies: to, source and numel of each.
    """
    columns = np.array(copies, np.uint64).reshape(-1, 3).T.copy()
    return bool(_copy_finite_many[dtype](*columns, len(copies)))


@generic
def gather(dense: NDArray[Any], indices: U32) -> NDArray[Any]:
    """``dense[indices]``, for float32, float64 or uint32. Indices must be below ``dense.size``; this is not checked."""
    values = allocate(dense, indices.size, dense.dtype)
    _gather[dense.itemsize](indices.size, dense, indices, indices.size, values)
    return values


@operation()
def scatter(values: Floats, places: U32) -> Floats:
    """An array ``out`` with ``out[places] = values``.

    Args:
        values: ``[n]``.
        places: ``[n]``, a permutation of 0 to n - 1; this is not checked.
    """
    out = np.empty_like(values)
    out[places] = values
    return out


@scatter.cuda
def _(values: Device, places: Device) -> Device:
    xp = array_module(values)
    out = xp.empty(values.size, values.dtype)
    if values.size:
        kernel = f"scatter_{suffix(values.dtype)}"
        for_each(xp, _FILE, kernel, values.size, values, places, values.size, out)
    return out


@operation()
def subtract_sent(dense: Floats, indices: U32 | None, values: Floats) -> None:
    """``dense[indices] -= values``, in place; for ``None``, ``dense -= values``.

    The values are cast to the dtype of ``dense``. On a GPU, within ``deferred.encoding``, ``dense`` stays as it is if
    the encoded gradient is not finite.
    """
    if indices is None:
        dense -= values
        return
    values = np.ascontiguousarray(values, dense.dtype)
    _subtract[dense.dtype](dense, indices, indices.size, values)


@subtract_sent.cuda
def _(dense: Device, indices: Device | None, values: Device) -> None:
    check_selection()
    if values.size:
        xp, values = array_module(dense), values.astype(dense.dtype, copy=False)
        for_each(
            xp, _FILE, f"subtract_{suffix(dense.dtype)}", values.size, dense, indices, values.size, values,
            residual_guard(), selection_guard(),
        )  # fmt: skip


@operation()
def sum_into(out: Floats, parts: list[tuple[U32 | None, Floats]], scale: float, threads: int = 1) -> None:
    """``out = scale * (the sum of all parts)``, summed in the order of the parts.

    Args:
        out: ``[numel]``; what it holds is overwritten.
        parts: (indices, values) each, or (``None``, a value for each element). The indices are strictly increasing and
            below numel; this is not checked. The values are cast to the dtype of ``out``.
        scale: in the dtype of ``out``.
        threads: of the host.
    """
    cast = [(indices, np.ascontiguousarray(values, out.dtype)) for indices, values in parts]
    all_indices = np.array([0 if indices is None else address(indices) for indices, _ in cast], np.uint64)
    all_values = np.array([address(values) for _, values in cast], np.uint64)
    counts = np.array([values.size for _, values in cast], np.uint64)
    _sum[out.dtype](address(out), out.size, all_indices, all_values, counts, len(cast), scale, threads)


@sum_into.cuda
def _(out: Device, parts: list[tuple[Device | None, Device]], scale: float, threads: int = 1) -> None:
    xp = array_module(out)
    if not out.size:
        return
    # Parts without elements are left out: their arrays may have no address, and null indices mean a dense part.
    cast = [(indices, values.astype(out.dtype, copy=False)) for indices, values in parts if values.size]
    tiles = -(-out.size // SUM_TILE)
    for begin in range(0, max(1, len(cast)), SUM_PARTS):
        now = cast[begin : begin + SUM_PARTS]
        arguments = [argument for indices, values in now for argument in (indices, values, values.size)]
        arguments += [None, None, 0] * (SUM_PARTS - len(now))
        last = begin + SUM_PARTS >= len(cast)
        kind, size, count = suffix(out.dtype), u64(out.size), u32(len(now))
        starts = xp.empty(max(1, len(now)) * (tiles + 1), u32)
        most = max([values.size for indices, values in now if indices is not None], default=0)
        if most:
            blocks = len(now) * grid(xp, most + 1)
            launch(xp, _FILE, f"sum_starts_{kind}", blocks, size, count, *arguments, tiles, starts)
        launch(
            xp, _FILE, f"sum_{kind}", tiles, out, size, out.dtype.type(scale if last else 1.0), u32(begin > 0), count,
            *arguments, starts,
        )  # fmt: skip


@operation()
def to_host(array: NDArray[Any]) -> NDArray[Any]:
    """The array as a NumPy array; the same array if it is one. On a GPU, the host waits for the device."""
    return array


@to_host.cuda
def _(array: Device) -> Any:
    return array if isinstance(array, np.ndarray) else array.get()


@operation(1)
def move_like(array: NDArray[Any], like: Any) -> NDArray[Any]:
    """The array where ``like`` is: a NumPy array is copied to the GPU if ``like`` is there."""
    return array


@move_like.cuda
def _(array: Any, like: Device) -> Device:
    return array_module(like).asarray(array) if isinstance(array, np.ndarray) else array


@operation(1)
def move_all(arrays: Sequence[NDArray[Any]], like: Any) -> list[NDArray[Any]]:
    """NumPy arrays where ``like`` is: themselves, or copies on its GPU, which one copy brings there."""
    return list(arrays)


@move_all.cuda
def _(arrays: Sequence[Any], like: Device) -> list[Device]:
    ends = np.cumsum([-(-array.nbytes // 8) * 8 for array in arrays]).tolist()
    together = np.zeros(ends[-1] if ends else 0, np.uint8)
    begins = [0, *ends]
    for begin, array in zip(begins, arrays, strict=False):
        together[begin : begin + array.nbytes] = np.ascontiguousarray(array).view(np.uint8)
    there = array_module(like).asarray(together)
    return [
        there[begin : begin + array.nbytes].view(array.dtype) for begin, array in zip(begins, arrays, strict=False)
    ]


@generic
def zeros(count: int, dtype: Any, like: Any) -> NDArray[Any]:
    """``count`` zeros, allocated where ``like`` is."""
    room: NDArray[Any] = array_module(like).zeros(count, dtype)
    return room



@generic
def empty(count: int, dtype: Any, like: Any) -> NDArray[Any]:
    """``count`` elements that are not initialized, allocated where ``like`` is."""
    return allocate(like, count, dtype)



@generic
def arange(count: int, like: Any) -> U32:
    """0 to ``count - 1``, allocated where ``like`` is."""
    numbers: U32 = array_module(like).arange(count, dtype=u32)
    return numbers



@generic
def concatenate(arrays: list[NDArray[Any]]) -> NDArray[Any]:
    """One array with the elements of all arrays, of which there is at least one."""
    together: NDArray[Any] = array_module(arrays[0]).concatenate(arrays)
    return together



@operation()
def aligned(data: U8) -> U8:
    """The bytes at an address that is a multiple of 8: ``data`` itself, or a copy."""
    return data.copy() if data.size and address(data) % 8 else data


@aligned.cuda
def _(data: Device) -> Device:
    if not data.data.ptr % 8:
        return data
    return sections.remember_start(sections.join(b"", data), sections.known_start(data))


@operation()
def places(indices: U32, bounds: Sequence[int]) -> list[int]:
    """How many of the sorted indices are below each bound, which is below 2^32. On a GPU, the host waits for them."""
    found: list[int] = np.searchsorted(indices, np.array(bounds, np.uint32)).tolist()
    return found


@places.cuda
def _(indices: Device, bounds: Sequence[int]) -> list[int]:
    xp = array_module(indices)
    there, found = xp.asarray(np.array(bounds, u64)), xp.empty(len(bounds), u64)
    for_each(xp, _FILE, "places", len(bounds), indices, indices.size, there, len(bounds), found)
    return [int(place) for place in found.get()]


@operation()
def offset(indices: U32, by: int) -> U32:
    """``indices + by``. The sums must be below 2^32; this is not checked."""
    return indices + np.uint32(by)


@offset.cuda
def _(indices: Device, by: int) -> Device:
    xp = array_module(indices)
    out = xp.empty(indices.size, u32)
    for_each(xp, _FILE, "offset", indices.size, indices, indices.size, u32(by), out)
    return out


@operation()
def delete(indices: U32, places: U32) -> U32:
    """``numpy.delete(indices, places)``: the indices without those at ``places``, which are distinct and sorted."""
    return np.delete(indices, places)


@delete.cuda
def _(indices: Device, places: Device) -> Device:
    xp, count = array_module(indices), indices.size
    out = xp.empty(count - places.size, u32)
    if count:
        deleted = bitmap.encode(places, 32 * -(-count // 32)).view(u32)
        for_each(
            xp, _FILE, "delete_places", count, indices, count, deleted, scan_status(xp, count), counter(xp), out,
            out.size,
        )  # fmt: skip
    return out


@operation()
def to_float32(values: Floats) -> F32:
    """The values as float32, rounded to nearest and limited to its finite range; the same array if it is float32."""
    if values.dtype == np.float32:
        return np.ascontiguousarray(values, np.float32)
    limit = np.finfo(np.float32).max
    return np.clip(values, -limit, limit).astype(np.float32)


@to_float32.cuda
def _(values: Device) -> Device:
    if values.dtype == f32:
        return values
    xp, n = array_module(values), values.size
    narrow = xp.empty(n, f32)
    for_each(xp, _FILE, "narrow", n, values, n, narrow)
    return narrow
