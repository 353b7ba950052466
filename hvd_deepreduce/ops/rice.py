"""TODO rice."""

from __future__ import annotations

from ctypes import byref, c_uint64

import numpy as np

from hvd_deepreduce.ops.deferred import check_later, counter, read_counter
from hvd_deepreduce.ops.device import THREADS, array_module, grid, i32, launch, scan_status, u32, u64
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import address, check, kernel
from hvd_deepreduce.ops.types import U8, U32, Device

_rice_parameter = kernel("rice_parameter", "u", "pUU*")
_rice_encode = kernel("rice_encode", "v", "pUup")
_rice_decode = kernel("rice_decode", "I", "pUUuUp")


@operation()
def encode(indices: U32, numel: int) -> U8:
    """The section drawn in kernels/rice/rice.cpp.

    On a GPU: waits for the device: the size is not known before.
    """
    highs = c_uint64()
    b = _rice_parameter(address(indices), indices.size, numel, byref(highs))
    high_bits = highs.value + indices.size
    out = np.empty(1 + (indices.size * b + 7) // 8 + (high_bits + 7) // 8, np.uint8)
    out[0] = b
    _rice_encode(address(indices), indices.size, b, address(out) + 1)
    return out


@encode.cuda
def _(indices: Device, numel: int) -> Device:
    xp, count = array_module(indices), indices.size
    b = 0
    while b < 31 and (2 << b) <= 0.6931471805599453 * numel / count:
        b += 1
    # With this b, from which the device walks downhill, the highs are at most (numel - count) >> b zeros.
    most = 2 + (count * b + 7) // 8 + ((max(0, numel - count) >> b) + count + 7) // 8
    status = scan_status(xp, count)
    # | sums [32] | status | words of the section |
    scratch, bits = xp.zeros(32 + status.size + -(-most // 8) + 1, u64), counter(xp)
    sums, status, words = scratch[:32], scratch[32 : 32 + status.size], scratch[32 + status.size :].view(u32)
    launch(xp, "rice/rice", "rice_sums", grid(xp, count, THREADS), indices, u64(count), sums)
    launch(xp, "rice/rice", "rice_write", grid(xp, count), indices, u64(count), u64(numel), sums, status, words, bits)
    return words.view(np.uint8)[: (read_counter(bits) + 7) // 8]


@operation()
def decode(section: U8, numel: int, count: int) -> U32:
    """The indices of ``rice_encode``.

    On a GPU: waits for the device.
    """
    if section.size == 0 or section.size * 8 < count:
        check(-1)
    indices = np.empty(count, np.uint32)
    check(_rice_decode(address(section) + 1, section.size - 1, count, int(section[0]), numel, address(indices)))
    return indices


@decode.cuda
def _(section: Device, numel: int, count: int) -> Device:
    xp = array_module(section)
    if section.size == 0 or section.size * 8 < count:
        check(-1)
    highs, indices = xp.empty(count, u32), xp.empty(count, u32)
    each = 8 * THREADS
    tiles = -(-section.size // each) + 1
    # One piece of zeros: | found | end | error | status of the highs | status of the join |
    scratch = xp.zeros(3 + tiles + -(-count // THREADS) + 1, u64)
    found, end, error = scratch[:1], scratch[1:2], scratch[2:3].view(i32)[:1]
    launch(
        xp, "rice/rice", "rice_highs", grid(xp, section.size, each), section, u64(section.size), u64(count), scratch[3
        : 3 + tiles], highs, found,
    )  # fmt: skip
    launch(
        xp, "rice/rice", "rice_join", grid(xp, count), section, u64(section.size), u64(count), u64(numel), highs,
        found, scratch[3 + tiles :], end, indices, error,
    )  # fmt: skip
    check_later(error)
    return indices
