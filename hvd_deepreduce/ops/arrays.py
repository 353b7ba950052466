"""TODO arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_deepreduce.ops import bitmap, sections
from hvd_deepreduce.ops.deferred import counter, residual_guard
from hvd_deepreduce.ops.device import (
    NULL,
    THREADS,
    array_module,
    f32,
    grid,
    launch,
    or_null,
    scan_status,
    suffix,
    u32,
    u64,
)
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import address, kernels_by_dtype
from hvd_deepreduce.ops.types import F32, U8, U32, Device, Floats

_add = kernels_by_dtype("add", "v", "ppUi")
_gather = kernels_by_dtype("gather", "v", "ppUp")
_gather[np.dtype(np.uint32)] = _gather[np.dtype(np.float32)]  # it moves words
_settle = kernels_by_dtype("settle", "v", "ppUp")
_sum = kernels_by_dtype("sum", "v", "pUpppidi")


@operation()
def add(dense: Floats, gradient: Floats, threads: int = 1) -> None:
    """``dense += gradient``."""
    _add[dense.dtype](address(dense), address(gradient), dense.size, threads)


@add.cuda
def _(dense: Device, gradient: Device, threads: int = 1) -> None:
    if dense.size:
        xp = array_module(dense)
        blocks, guard = grid(xp, dense.size, 4 * THREADS), residual_guard()
        launch(xp, "select/select", f"add_{suffix(dense.dtype)}", blocks, dense, gradient, u64(dense.size), guard)


@operation()
def gather(dense: NDArray[Any], indices: U32) -> NDArray[Any]:
    """``dense[indices]``."""
    values = np.empty(indices.size, dense.dtype)
    _gather[dense.dtype](address(dense), address(indices), indices.size, address(values))
    return values


@gather.cuda
def _(dense: Device, indices: Device) -> Device:
    xp = array_module(dense)
    values = xp.empty(indices.size, dense.dtype)
    if indices.size:
        kernel = f"gather_{suffix(dense.dtype)}"
        launch(xp, "select/select", kernel, grid(xp, indices.size), dense, indices, u64(indices.size), values)
    return values


@operation()
def scatter(values: Floats, places: U32) -> Floats:
    """``out`` with ``out[places] = values``; the places are a permutation."""
    out = np.empty_like(values)
    out[places] = values
    return out


@scatter.cuda
def _(values: Device, places: Device) -> Device:
    xp = array_module(values)
    out = xp.empty(values.size, values.dtype)
    if values.size:
        kernel = f"scatter_{suffix(values.dtype)}"
        launch(xp, "select/select", kernel, grid(xp, values.size), values, places, u64(values.size), out)
    return out


@operation()
def subtract_sent(dense: Floats, indices: U32 | None, values: Floats) -> None:
    """``dense[indices] -= values``; None: all of it."""
    if indices is None:
        dense -= values
        return
    values = np.ascontiguousarray(values, dense.dtype)
    _settle[dense.dtype](address(dense), address(indices), indices.size, address(values))


@subtract_sent.cuda
def _(dense: Device, indices: Device | None, values: Device) -> None:
    if values.size:
        xp, values = array_module(dense), values.astype(dense.dtype, copy=False)
        launch(
            xp, "select/select", f"settle_{suffix(dense.dtype)}", grid(xp, values.size), dense, or_null(indices),
            u64(values.size), values, residual_guard(),
        )  # fmt: skip


@operation()
def sum_into(out: Floats, parts: list[tuple[U32 | None, Floats]], scale: float, threads: int = 1) -> None:
    """``out = scale * sum of parts``, in their order; a part is (indices, values), or (None, dense values)."""
    kept = [(i, np.ascontiguousarray(v, out.dtype)) for i, v in parts]
    indices = np.array([0 if i is None else address(i) for i, _ in kept], np.uint64)
    values = np.array([address(v) for _, v in kept], np.uint64)
    counts = np.array([v.size for _, v in kept], np.uint64)
    _sum[out.dtype](
        address(out), out.size, address(indices), address(values), address(counts), len(kept), scale, threads
    )


@sum_into.cuda
def _(out: Device, parts: list[tuple[Device | None, Device]], scale: float, threads: int = 1) -> None:
    xp = array_module(out)
    if not out.size:
        return
    # A part without elements adds nothing; its array may have no address, which would mean a dense part.
    kept = [(i, v.astype(out.dtype, copy=False)) for i, v in parts if v.size]
    for begin in range(0, max(1, len(kept)), 8):
        some = kept[begin : begin + 8]
        arguments = [argument for i, v in some for argument in (or_null(i), v, u64(v.size))]
        arguments += [NULL, NULL, u64(0)] * (8 - len(some))
        last = begin + 8 >= len(kept)
        launch(
            xp, "select/select", f"sum_{suffix(out.dtype)}", -(-out.size // 2048), out, u64(out.size),
            out.dtype.type(scale if last else 1.0), u32(begin > 0), u32(len(some)), *arguments,
        )  # fmt: skip


@operation()
def to_host(array: NDArray[Any]) -> NDArray[Any]:
    """The array on the host.

    On a GPU: waits for the device.
    """
    return array


@to_host.cuda
def _(array: Device) -> Any:
    return array if isinstance(array, np.ndarray) else array.get()


@operation(1)
def move_like(array: NDArray[Any], like: Any) -> NDArray[Any]:
    """A host's array where ``like`` is."""
    return array


@move_like.cuda
def _(array: Any, like: Device) -> Device:
    return array_module(like).asarray(array) if isinstance(array, np.ndarray) else array


@operation(2)
def zeros(count: int, dtype: Any, like: Any) -> NDArray[Any]:
    """``count`` zeros."""
    return np.zeros(count, dtype)


@zeros.cuda
def _(count: int, dtype: Any, like: Device) -> Device:
    return array_module(like).zeros(count, dtype)


@operation(2)
def empty(count: int, dtype: Any, like: Any) -> NDArray[Any]:
    """``count`` elements of any value."""
    return np.empty(count, dtype)


@empty.cuda
def _(count: int, dtype: Any, like: Device) -> Device:
    return array_module(like).empty(count, dtype)


@operation(1)
def arange(count: int, like: Any) -> U32:
    """0 to ``count - 1``."""
    return np.arange(count, dtype=np.uint32)


@arange.cuda
def _(count: int, like: Device) -> Device:
    return array_module(like).arange(count, dtype=u32)


@operation()
def concatenate(arrays: list[NDArray[Any]]) -> NDArray[Any]:
    """One array behind the other."""
    return np.concatenate(arrays)


@concatenate.cuda
def _(arrays: list[Device]) -> Device:
    return array_module(arrays[0]).concatenate(arrays)


@operation()
def aligned(data: U8) -> U8:
    """The bytes, at an address that whole words can be read from."""
    return data.copy() if data.__array_interface__["data"][0] % 8 else data


@aligned.cuda
def _(data: Device) -> Device:
    return sections.join(b"", data) if data.data.ptr % 8 else data


@operation()
def offset(indices: U32, by: int) -> U32:
    """``indices + by``."""
    return indices + np.uint32(by)


@offset.cuda
def _(indices: Device, by: int) -> Device:
    xp = array_module(indices)
    out = xp.empty(indices.size, u32)
    if indices.size:
        launch(xp, "bits/bits", "moved", grid(xp, indices.size), indices, u64(indices.size), u32(by), out)
    return out


@operation()
def delete(indices: U32, places: U32) -> U32:
    """What is left of the indices when those at distinct ``places`` are taken away."""
    return np.delete(indices, places)


@delete.cuda
def _(indices: Device, places: Device) -> Device:
    xp, count = array_module(indices), indices.size
    out = xp.empty(count - places.size, u32)
    if count:
        dropped = bitmap.encode(places, 32 * -(-count // 32)).view(u32)
        launch(
            xp, "bloom/bloom", "keep_others", grid(xp, count), indices, u64(count), dropped, scan_status(xp, count),
            counter(xp), out, u64(out.size),
        )  # fmt: skip
    return out


@operation()
def to_float32(values: Floats) -> F32:
    """The values in float32, those beyond its range at its ends; the same array where they are float32 already."""
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
    if n:
        launch(xp, "half/half", "narrow", grid(xp, n), values, u64(n), narrow)
    return narrow
