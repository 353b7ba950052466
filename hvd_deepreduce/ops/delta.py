"""TODO delta."""

from __future__ import annotations

import numpy as np

from hvd_deepreduce.ops import strings
from hvd_deepreduce.ops.deferred import check_later, counter
from hvd_deepreduce.ops.device import array_module, grid, i32, launch, scan_status, u32, u64
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import address, check, kernel
from hvd_deepreduce.ops.types import U8, U32, Device

_delta_encode = kernel("delta_encode", "U", "pUp")
_delta_decode = kernel("delta_decode", "I", "pUUUpp")


@operation()
def encode(keys: U32) -> U8:
    """The section of sorted unique keys drawn in kernels/delta/delta.cpp.

    On a GPU: waits for the device: the size is not known before.
    """
    out = np.empty(5 * keys.size + 160, np.uint8)
    return out[: _delta_encode(address(keys), keys.size, address(out))].copy()


@encode.cuda
def _(keys: Device) -> Device:
    xp, n, file = array_module(keys), keys.size, "entropy/codes"
    if n == 0:
        return xp.empty(0, np.uint8)
    out, plan, lengths = xp.zeros((5 * n + 163) // 4, u32), xp.zeros(20, u64), xp.zeros(33, u64)
    launch(xp, file, "delta_count", grid(xp, n), keys, u64(n), lengths)
    launch(xp, file, "delta_plan", 1, lengths, u64(n), plan, out)
    for part in ("delta_prefixes", "delta_deltas"):
        launch(xp, file, part, grid(xp, n), keys, u64(n), plan, scan_status(xp, n), counter(xp), out)
    return out.view(np.uint8)[: int(plan[2:3].get()[0]) // 8]


@operation()
def decode(section: U8, numel: int, count: int) -> U32:
    """The keys of ``delta_encode``, all below ``numel``.

    On a GPU: waits for the device.
    """
    if section.size * 4 < count:  # a key takes two bits or more
        check(-1)
    scratch, keys = np.empty(count, np.uint8), np.empty(count, np.uint32)
    check(_delta_decode(address(section), section.size, count, numel, address(scratch), address(keys)))
    return keys


@decode.cuda
def _(section: Device, numel: int, count: int) -> Device:
    xp, file, size = array_module(section), "entropy/codes", section.size
    if size * 4 < count:  # a key takes two bits or more
        check(-1)
    keys, error = xp.empty(count, u32), xp.zeros(1, i32)
    if count == 0:
        check(-3 if size else 0)
        return keys
    table, read, at, end = xp.zeros(4096, np.uint16), xp.zeros(3, u64), counter(xp), counter(xp)
    chunks = strings.count_chunks(section)
    exits, bits, deltas = xp.zeros(chunks * 12, u64), xp.empty(count, np.uint8), xp.zeros(count, u32)
    launch(xp, file, "delta_read", 1, section, u64(size), table, read, error)
    launch(xp, file, "delta_walk", grid(xp, exits.size), section, u64(size), read, table, u64(chunks), exits)
    starts, _ = strings.join_chunks(xp, exits, 12, chunks)
    launch(
        xp, file, "delta_lengths", grid(xp, chunks), section, u64(size), read, table, u64(chunks), starts, u64(count),
        bits, at,
    )  # fmt: skip
    launch(
        xp, file, "delta_values", grid(xp, count), section, u64(size), bits, at, u64(count), scan_status(xp, count),
        end, deltas, error,
    )  # fmt: skip
    launch(
        xp, file, "delta_keys", grid(xp, count), deltas, u64(count), u64(numel), scan_status(xp, count), end, keys,
        error,
    )  # fmt: skip
    check_later(error)
    return keys
