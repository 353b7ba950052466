"""TODO elias_fano."""

from __future__ import annotations

import numpy as np

from hvd_deepreduce.ops.deferred import check_later, counter
from hvd_deepreduce.ops.device import THREADS, array_module, grid, i32, launch, scan_status, u32, u64
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import address, check, kernel
from hvd_deepreduce.ops.types import U8, U32, Device

_elias_fano_bytes = kernel("elias_fano_bytes", "U", "pUU")
_elias_fano_encode = kernel("elias_fano_encode", "v", "pUUp")
_elias_fano_decode = kernel("elias_fano_decode", "I", "pUUUp")


def _low_bits(count: int, numel: int) -> int:
    return min(range(32), key=lambda low: count * low + ((numel - 1) >> low))


@operation()
def encode(indices: U32, numel: int) -> U8:
    """The section drawn in kernels/elias_fano/elias_fano.cpp.

    On a GPU: waits for the device: the last index says how long it is.
    """
    out = np.empty(_elias_fano_bytes(address(indices), indices.size, numel), np.uint8)
    _elias_fano_encode(address(indices), indices.size, numel, address(out))
    return out


@encode.cuda
def _(indices: Device, numel: int) -> Device:
    xp, count = array_module(indices), indices.size
    if count == 0:
        return xp.empty(0, np.uint8)
    low, last = _low_bits(count, numel), int(indices[count - 1 :].get()[0])
    size = (count * low + 7) // 8 + ((last >> low) + count + 7) // 8
    words = xp.zeros(-(-size // 4), u32)
    launch(xp, "rice/rice", "elias_fano_write", grid(xp, count), indices, u64(count), u32(low), words)
    return words.view(np.uint8)[:size]


@operation()
def decode(section: U8, numel: int, count: int) -> U32:
    """The indices of ``elias_fano_encode``.

    On a GPU: waits for the device.
    """
    if section.size * 8 < count:
        check(-1)
    indices = np.empty(count, np.uint32)
    check(_elias_fano_decode(address(section), section.size, count, numel, address(indices)))
    return indices


@decode.cuda
def _(section: Device, numel: int, count: int) -> Device:
    xp = array_module(section)
    if section.size * 8 < count:
        check(-1)
    indices = xp.empty(count, u32)
    if count == 0:
        check(-3 if section.size else 0)
        return indices
    low = _low_bits(count, numel)
    at = (count * low + 7) // 8
    if section.size < at:
        check(-1)
    highs, found, error = xp.empty(count, u32), counter(xp), xp.zeros(1, i32)
    rest, each = section[at:], 8 * THREADS
    if rest.size:
        launch(
            xp, "rice/rice", "elias_fano_highs", grid(xp, rest.size, each), rest, u64(rest.size), u64(count),
            scan_status(xp, rest.size, each), highs, found,
        )  # fmt: skip
    launch(
        xp, "rice/rice", "elias_fano_join", grid(xp, count), section, u64(section.size), u64(at), u64(count),
        u64(numel), u32(low), highs, found, indices, error,
    )  # fmt: skip
    check_later(error)
    return indices
