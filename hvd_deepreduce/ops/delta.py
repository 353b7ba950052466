"""Delta-binary code with an adaptive prefix; kernels/delta/delta.cpp draws the section."""

from __future__ import annotations

import numpy as np

from hvd_deepreduce.ops import entropy
from hvd_deepreduce.ops.deferred import check_later, counter, read_counter
from hvd_deepreduce.ops.device import THREADS, array_module, cleared, for_each, grid, launch, scan_status
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import check, check_room, kernel
from hvd_deepreduce.ops.types import U8, U32, Device, i32, u32, u64

bound = kernel("delta_bound", "U", "U")
"""The most bytes of a section, and of what is stored past its end, for so many keys."""
_encode = kernel("delta_encode", "U", "pUp")
_decode = kernel("delta_decode", "I", "pUUUpp")

_FILE = "delta/delta"
PLAN_WORDS, _HEAD_WORDS = 53, 3
"""Sizes of DeltaPlan and DeltaHead in kernels/delta/, in words of 8 bytes."""


@operation()
def encode(keys: U32) -> U8:
    """The section of strictly increasing keys, empty for none.

    On a GPU, the host waits for the device to learn the size of the section.
    """
    out = np.empty(bound(keys.size), np.uint8)
    return out[: _encode(keys, keys.size, out)].copy()


@encode.cuda
def _(keys: Device) -> Device:
    xp, n = array_module(keys), keys.size
    if n == 0:
        return xp.empty(0, np.uint8)
    out, plan, lengths = cleared(xp, -(-bound(n) // 4), u32), xp.empty(PLAN_WORDS, u64), cleared(xp, 33, u64)
    tiles = -(-n // THREADS) + 1
    size, status, ends = counter(xp), cleared(xp, 2 * tiles, u64), cleared(xp, 2, u64)
    for_each(xp, _FILE, "delta_count", n, keys, n, lengths, tile=8 * THREADS)
    launch(xp, _FILE, "delta_plan", 1, lengths, n, plan, size)
    launch(xp, _FILE, "delta_write", 2 * grid(xp, n), keys, n, plan, tiles, status, ends, out)
    return out.view(np.uint8)[: read_counter(size)]


@operation()
def decode(section: U8, numel: int, count: int) -> U32:
    """The ``count`` keys of a section, uint32.

    On a GPU, the host waits for the result of the check, unless checks are deferred.

    Raises:
        ValueError: an encoder cannot have written the section for ``count`` keys below ``numel``.
    """
    check_room(section, 2 * count)  # a key takes at least two bits
    scratch, keys = np.empty(count, np.uint8), np.empty(count, np.uint32)
    check(_decode(section, section.size, count, numel, scratch, keys))
    return keys


@decode.cuda
def _(section: Device, numel: int, count: int) -> Device:
    xp, size = array_module(section), section.size
    check_room(section, 2 * count)  # a key takes at least two bits
    keys, error = xp.empty(count, u32), cleared(xp, 1, i32)
    if count == 0:
        check(-3 if size else 0)
        return keys
    table, head, at, end = entropy.code_table(xp), cleared(xp, _HEAD_WORDS, u64), counter(xp), counter(xp)
    chunks, entries = entropy.count_chunks(section), entropy.LONGEST
    exits, bits, deltas = cleared(xp, chunks * entries, u64), xp.empty(count, np.uint8), cleared(xp, count, u32)
    launch(xp, _FILE, "delta_read", 1, section, size, table, head, error)
    for_each(xp, _FILE, "delta_walk", exits.size, section, size, head, table, chunks, exits)
    starts, _ = entropy.join_chunks(xp, exits, entries, chunks)
    launch(
        xp, _FILE, "delta_lengths", grid(xp, chunks), section, size, head, table, chunks, starts, count, bits, at,
        error,
    )  # fmt: skip
    launch(
        xp, _FILE, "delta_values", grid(xp, count), section, size, bits, at, count, scan_status(xp, count), end, deltas,
        error,
    )  # fmt: skip
    launch(xp, _FILE, "delta_keys", grid(xp, count), deltas, count, numel, scan_status(xp, count), end, keys, error)
    check_later(error)
    return keys
