"""TODO rle."""

from __future__ import annotations

import numpy as np

from hvd_deepreduce.ops import strings
from hvd_deepreduce.ops.deferred import check_later, counter, read_counter
from hvd_deepreduce.ops.device import array_module, grid, i32, launch, scan_status, u32, u64
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import address, check, kernel
from hvd_deepreduce.ops.types import U8, U32, Device

_rle_encode = kernel("rle_encode", "U", "pUUp")
_rle_decode = kernel("rle_decode", "I", "pUUUp")


@operation()
def encode(indices: U32, numel: int) -> U8:
    """The section drawn in kernels/rle/rle.cpp.

    On a GPU: waits for the device: the size is not known before.
    """
    out = np.empty(16 * indices.size + 16, np.uint8)
    return out[: _rle_encode(address(indices), indices.size, numel, address(out))].copy()


@encode.cuda
def _(indices: Device, numel: int) -> Device:
    xp, n, file = array_module(indices), indices.size, "entropy/codes"
    if n == 0:
        return xp.empty(0, np.uint8)
    begins, runs, lengths, end = xp.empty(n, u32), counter(xp), xp.zeros(68, u64), counter(xp)
    words = xp.zeros(2 * n + 2, u32)  # a pair of runs takes no more than two fields of 32 bits
    launch(xp, file, "rle_runs", grid(xp, n), indices, u64(n), scan_status(xp, n), runs, begins)
    launch(xp, file, "rle_count", grid(xp, n), indices, u64(n), begins, runs, lengths)
    launch(
        xp, file, "rle_write", grid(xp, n), indices, u64(n), u32((numel - 1).bit_length()), begins, runs, lengths,
        scan_status(xp, n), words, end,
    )  # fmt: skip
    return words.view(np.uint8)[: (read_counter(end) + 7) // 8]


@operation()
def decode(section: U8, numel: int, count: int) -> U32:
    """The indices of ``rle_encode``.

    On a GPU: waits for the device.
    """
    indices = np.empty(count, np.uint32)
    check(_rle_decode(address(section), section.size, count, numel, address(indices)))
    return indices


@decode.cuda
def _(section: Device, numel: int, count: int) -> Device:
    xp, file, size = array_module(section), "entropy/codes", section.size
    indices, error = xp.empty(count, u32), xp.zeros(1, i32)
    if count == 0:
        check(-3 if size else 0)
        return indices
    if size < 3:
        check(-1)
    escape, chunks = u32((numel - 1).bit_length()), strings.count_chunks(section)
    exits = xp.zeros(chunks * 128, u64)
    launch(xp, file, "rle_walk", grid(xp, exits.size), section, u64(size), escape, u64(chunks), exits)
    starts, _ = strings.join_chunks(xp, exits, 128, chunks)
    # Pairs of runs: no more than elements, and none without two bits.
    room = min(count, 4 * size)
    zeros, ones, ends, places = xp.zeros(room, u64), xp.zeros(room, u64), xp.zeros(room, u64), xp.empty(room, u64)
    firsts, pairs, end = xp.empty(room, u32), counter(xp), counter(xp)
    launch(
        xp, file, "rle_read", grid(xp, chunks), section, u64(size), escape, u64(chunks), starts, u64(room), zeros,
        ones, ends,
    )  # fmt: skip
    launch(xp, file, "rle_places", grid(xp, room), ones, u64(room), scan_status(xp, room), end, places)
    launch(
        xp, file, "rle_firsts", grid(xp, room), section, u64(size), zeros, ones, ends, places, u64(room), u64(count),
        u64(numel), scan_status(xp, room), end, firsts, pairs, error,
    )  # fmt: skip
    launch(xp, file, "rle_fill", grid(xp, count), places, firsts, pairs, u64(count), indices, error)
    check_later(error)
    return indices
