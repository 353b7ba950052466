"""TODO select."""

from __future__ import annotations

from ctypes import byref, c_uint64
from typing import Any

import numpy as np

from hvd_deepreduce.ops import arrays, deferred
from hvd_deepreduce.ops.bits import find_ones
from hvd_deepreduce.ops.deferred import counter, read_counter, residual_guard
from hvd_deepreduce.ops.device import (
    NULL,
    THREADS,
    array_module,
    f64,
    grid,
    launch,
    or_null,
    scan_status,
    suffix,
    u32,
    u64,
)
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import address, kernel, kernels_by_dtype
from hvd_deepreduce.ops.types import U32, Device, Floats

_topk = kernels_by_dtype("topk", "i", "ppUUppi")
_threshold = kernels_by_dtype("threshold", "p", "ppUdi*")
_take = kernels_by_dtype("take", "v", "ppp")
_random_indices = kernel("random_indices", "i", "UUuuup")
_block_norms = kernels_by_dtype("block_norms", "v", "ppUUipi")


@operation()
def topk(dense: Floats, gradient: Floats | None, k: int, threads: int = 1) -> tuple[U32, Floats]:
    """``dense += gradient``, then its k largest magnitudes: sorted indices and values. Ties: the lower index."""
    indices, values = np.empty(k, np.uint32), np.empty(k, dense.dtype)
    source = None if gradient is None else address(gradient)
    if _topk[dense.dtype](address(dense), source, dense.size, k, address(indices), address(values), threads):
        raise MemoryError(f"top-k of {dense.size} elements found no memory for its candidates")
    return indices, values


@topk.cuda
def _(dense: Device, gradient: Device | None, k: int, threads: int = 1) -> tuple[Device, Device]:
    xp, n, ending = array_module(dense), dense.size, suffix(dense.dtype)
    if n >= 2**31:
        raise ValueError(f"top-k on a GPU takes fewer than 2^31 elements, and this tensor has {n}: split it")
    indices, values = xp.empty(k, u32), xp.empty(k, dense.dtype)
    if k == 0:
        if gradient is not None:
            arrays.add(dense, gradient)
        return indices, values
    room = min(n, 2 * k + n // 256 + 65536)
    candidates, found = xp.empty(room, u32), xp.empty(room, dense.dtype)
    passes = 3 if dense.itemsize == 4 else 6
    tile = 16 * THREADS if dense.itemsize == 4 else 8 * THREADS
    # One piece of zeros for all: | state [2] | counts [passes * 2048 u32] | status of collect | status of take |
    collect_tiles, take_tiles = -(-n // tile) + 1, -(-n // (4 * THREADS)) + 1
    scratch = xp.zeros(2 + passes * 1024 + collect_tiles + take_tiles, u64)
    state, counts = scratch[:2], scratch[2 : 2 + passes * 1024].view(u32)
    collect_status, take_status = scratch[2 + passes * 1024 : -take_tiles], scratch[-take_tiles:]
    source, now = or_null(gradient), deferred.state.encoding
    # The first block takes the sample; where the gradient has not been looked at, the others do that.
    looks = now is not None and not now.checked and gradient is not None and gradient.size == now.gradient.size
    blocks, bad = (1 + grid(xp, n, 4 * THREADS), now.check_finite(fused=True)) if now and looks else (1, NULL)
    launch(xp, "select/select", f"topk_sample_{ending}", blocks, dense, source, u64(n), u64(k), state, bad)
    launch(
        xp, "select/select", f"topk_collect_{ending}", grid(xp, n, tile), dense, source, u64(n), residual_guard(),
        state, collect_status, candidates, found, u64(room),
    )  # fmt: skip
    for number in range(passes):
        launch(
            xp, "select/select", f"topk_count_{ending}", grid(xp, room), dense, u64(n), u64(k), candidates, found,
            u64(room), state, u32(number), counts,
        )  # fmt: skip
    launch(
        xp, "select/select", f"topk_take_{ending}", grid(xp, room, 4 * THREADS), dense, u64(n), u64(k), candidates,
        found, u64(room), state, counts, u32(passes), take_status, indices, values,
    )  # fmt: skip
    return indices, values


@operation()
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


@threshold.cuda
def _(dense: Device, gradient: Device | None, least: float, threads: int = 1) -> tuple[Device, Device]:
    xp, n, ending = array_module(dense), dense.size, suffix(dense.dtype)
    with np.errstate(over="ignore"):
        limit = dense.dtype.type(least)
    if float(limit) < least:
        limit = np.nextafter(limit, dense.dtype.type(np.inf))
    bits = max(1, int(np.abs(limit).view(u32 if dense.itemsize == 4 else u64)))
    tile = 16 * THREADS if dense.itemsize == 4 else 8 * THREADS
    room = min(n, n // 16 + 65536)
    while True:
        indices, values, count = xp.empty(room, u32), xp.empty(room, dense.dtype), counter(xp)
        if n:
            launch(
                xp, "select/select", f"threshold_{ending}", grid(xp, n, tile), dense, or_null(gradient), u64(n),
                residual_guard(), u64(bits), scan_status(xp, n, tile), indices, values, u64(room), count,
            )  # fmt: skip
        kept = read_counter(count)
        if kept <= room:
            return indices[:kept], values[:kept]
        room, gradient = kept, None  # the gradient is in already


@operation()
def block_norms(dense: Floats, gradient: Floats | None, block: int, l2: bool, threads: int = 1) -> Floats:
    """``dense += gradient``, then a float64 a block: its sum of squares, or of magnitudes."""
    norms = np.empty(-(-dense.size // block), np.float64)
    source = None if gradient is None else address(gradient)
    _block_norms[dense.dtype](address(dense), source, dense.size, block, l2, address(norms), threads)
    return norms


@block_norms.cuda
def _(dense: Device, gradient: Device | None, block: int, l2: bool, threads: int = 1) -> Device:
    xp = array_module(dense)
    norms = xp.empty(-(-dense.size // block), f64)
    if dense.size:
        launch(
            xp, "select/select", f"block_norms_{suffix(dense.dtype)}", grid(xp, norms.size, 8), dense,
            or_null(gradient), u64(dense.size), residual_guard(), u64(block), u32(l2), norms,
        )  # fmt: skip
    return norms


@operation()
def block_indices(blocks: U32, block: int, numel: int) -> U32:
    """The indices of all elements of sorted blocks; the last block of a tensor ends with it.

    On a GPU: waits for the device: is that block among them?
    """
    # In 64 bits: the last block may end beyond 2^32.
    indices = np.add.outer(blocks.astype(np.int64) * block, np.arange(min(block, numel))).ravel()
    return indices[: np.searchsorted(indices, numel)].astype(np.uint32)


@block_indices.cuda
def _(blocks: Device, block: int, numel: int) -> Device:
    xp, count, block = array_module(blocks), blocks.size, min(block, max(numel, 1))
    size = count * block
    if count and numel % block:
        size += min(0, numel - (int(blocks[count - 1 :].get()[0]) + 1) * block)
    indices = xp.empty(size, u32)
    if size:
        launch(xp, "bits/bits", "of_blocks", grid(xp, size), blocks, u64(block), u64(size), indices)
    return indices


@operation(5)
def random_indices(numel: int, count: int, seed: int, parameter: int, step: int, like: Any) -> U32:
    """``count`` distinct sorted indices below ``numel``, the same wherever the key is the same; ``like`` tells the
    backend."""
    indices = np.empty(count, np.uint32)
    if _random_indices(numel, count, seed, parameter, step, address(indices)):
        raise MemoryError(f"a random choice out of {numel} elements found no memory for one bit each")
    return indices


@random_indices.cuda
def _(numel: int, count: int, seed: int, parameter: int, step: int, like: Any) -> Device:
    xp = array_module(like)
    bitmap, indices = xp.zeros(-(-numel // 32), u32), xp.empty(count, u32)
    if count:
        key = (u32(seed), u32(parameter), u32(step & 0xFFFFFFFF))
        launch(xp, "select/select", "random_bits", grid(xp, count), u64(numel), u64(count), *key, bitmap)
        find_ones(xp, bitmap.view(np.uint8), indices)
    return indices
