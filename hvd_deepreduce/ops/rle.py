"""Run lengths of a bitmap's bits; kernels/rle/rle.cpp draws the section."""

from __future__ import annotations

import numpy as np

from hvd_deepreduce.ops import entropy
from hvd_deepreduce.ops.deferred import check_later, counter, read_counter
from hvd_deepreduce.ops.device import array_module, cleared, for_each, grid, launch, scan_status
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import check, kernel
from hvd_deepreduce.ops.types import U8, U32, Device, i32, u32, u64

_bound = kernel("rle_bound", "U", "U")
_encode = kernel("rle_encode", "U", "pUUp")
_decode = kernel("rle_decode", "I", "pUUUp")

_FILE = "rle/rle"
_ENTRIES = 2 * 64
"""Entries of a chunk: zeros and ones are two phases, and a field with its escape has at most 64 bits."""


@operation()
def encode(indices: U32, numel: int) -> U8:
    """The section of strictly increasing indices below ``numel``, empty for none.

    On a GPU, the host waits for the device to learn the size of the section.
    """
    out = np.empty(_bound(indices.size), np.uint8)
    return out[: _encode(indices, indices.size, numel, out)].copy()


@encode.cuda
def _(indices: Device, numel: int) -> Device:
    xp, n = array_module(indices), indices.size
    if n == 0:
        return xp.empty(0, np.uint8)
    begins, runs, lengths, end = xp.empty(n, u32), counter(xp), cleared(xp, 68, u64), counter(xp)
    words = cleared(xp, -(-_bound(n) // 4), u32)
    for_each(xp, _FILE, "rle_runs", n, indices, n, scan_status(xp, n), runs, begins)
    for_each(xp, _FILE, "rle_count", n, indices, n, begins, runs, lengths)
    for_each(xp, _FILE, "rle_write", n, indices, n, numel, begins, runs, lengths, scan_status(xp, n), words, end)
    return words.view(np.uint8)[: (read_counter(end) + 7) // 8]


@operation()
def decode(section: U8, numel: int, count: int) -> U32:
    """The ``count`` indices of a section, uint32.

    On a GPU, the host waits for the result of the check, unless checks are deferred.

    Raises:
        ValueError: an encoder cannot have written the section for ``count`` indices below ``numel``.
    """
    indices = np.empty(count, np.uint32)
    check(_decode(section, section.size, count, numel, indices))
    return indices


@decode.cuda
def _(section: Device, numel: int, count: int) -> Device:
    xp, size = array_module(section), section.size
    indices, error = xp.empty(count, u32), cleared(xp, 1, i32)
    if count == 0:
        check(-3 if size else 0)
        return indices
    if size < 3:
        check(-1)
    chunks = entropy.count_chunks(section)
    exits = cleared(xp, chunks * _ENTRIES, u64)
    for_each(xp, _FILE, "rle_walk", exits.size, section, size, numel, chunks, exits)
    starts, _ = entropy.join_chunks(xp, exits, _ENTRIES, chunks)
    room = min(count, 4 * size)  # pairs of runs: each has an index, and takes at least two bits
    zeros, ones, ends = (cleared(xp, room, u64) for _ in range(3))
    places = xp.empty(room, u64)
    firsts, pairs, end = xp.empty(room, u32), counter(xp), counter(xp)
    for_each(xp, _FILE, "rle_read", chunks, section, size, numel, chunks, starts, room, zeros, ones, ends)
    for_each(xp, _FILE, "rle_places", room, ones, room, scan_status(xp, room), end, places)
    launch(
        xp, _FILE, "rle_firsts", grid(xp, room), section, size, zeros, ones, ends, places, room, count, numel,
        scan_status(xp, room), end, firsts, pairs, error,
    )  # fmt: skip
    launch(xp, _FILE, "rle_fill", grid(xp, count), places, firsts, pairs, count, indices, error)
    check_later(error)
    return indices
