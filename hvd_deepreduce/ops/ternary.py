"""Ternary digits, five to a byte; kernels/ternary/trits.h draws the bytes (codecs/value/ternary.py)."""

from __future__ import annotations

import numpy as np

from hvd_deepreduce.ops.deferred import check_later
from hvd_deepreduce.ops.device import array_module, cleared, grid, i32, launch, u64
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import address, check, check_size, kernel
from hvd_deepreduce.ops.types import U8, Device

_ternary_pack = kernel("ternary_pack", "v", "pUp")
_ternary_unpack = kernel("ternary_unpack", "I", "pUp")


def packed_size(count: int) -> int:
    """The bytes that ``count`` digits take."""
    return -(-count // 5)


@operation()
def pack(digits: U8) -> U8:
    """Packs digits 0, 1, 2: uint8 ``[n]`` to uint8 ``[ceil(n / 5)]``."""
    packed = np.empty(packed_size(digits.size), np.uint8)
    _ternary_pack(address(digits), digits.size, address(packed))
    return packed


@pack.cuda
def _(digits: Device) -> Device:
    xp = array_module(digits)
    packed = xp.empty(packed_size(digits.size), np.uint8)
    if packed.size:
        launch(xp, "ternary/ternary", "ternary_pack", grid(xp, packed.size), digits, u64(digits.size), packed)
    return packed


@operation()
def unpack(packed: U8, count: int) -> U8:
    """The ``count`` digits of ``pack``.

    On a GPU, the host waits for the check of the bytes, unless checks are deferred.

    Raises:
        ValueError: ``packed`` does not have ceil(count / 5) bytes, or ``pack`` cannot have written them.
    """
    check_size(packed, packed_size(count))  # before an array of that size is allocated
    digits = np.empty(count, np.uint8)
    check(_ternary_unpack(address(packed), count, address(digits)))
    return digits


@unpack.cuda
def _(packed: Device, count: int) -> Device:
    xp = array_module(packed)
    check_size(packed, packed_size(count))  # before an array of that size is allocated
    digits, error = xp.empty(count, np.uint8), cleared(xp, 1, i32)
    if count:
        launch(xp, "ternary/ternary", "ternary_unpack", grid(xp, packed.size), packed, u64(count), digits, error)
        check_later(error)
    return digits
