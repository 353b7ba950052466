"""Ternary digits, five to a byte; kernels/ternary/trits.h draws the bytes (codecs/value/ternary.py)."""

from __future__ import annotations

import numpy as np

from hvd_deepreduce.ops.deferred import generic_kernel
from hvd_deepreduce.ops.device import allocate
from hvd_deepreduce.ops.dispatch import generic
from hvd_deepreduce.ops.library import check_size
from hvd_deepreduce.ops.types import U8

_FILE = "ternary/ternary"
_ternary_pack = generic_kernel(_FILE, "ternary_pack", "v", "pUp")
_ternary_unpack = generic_kernel(_FILE, "ternary_unpack", "I", "pUp")


def packed_size(count: int) -> int:
    """The bytes that ``count`` digits take."""
    return -(-count // 5)


@generic
def pack(digits: U8) -> U8:
    """Packs digits 0, 1, 2: uint8 ``[n]`` to uint8 ``[ceil(n / 5)]``."""
    packed = allocate(digits, packed_size(digits.size), np.uint8)
    _ternary_pack(packed.size, digits, digits.size, packed)
    return packed


@generic
def unpack(packed: U8, count: int) -> U8:
    """The ``count`` digits of ``pack``.

    On a GPU, the host waits for the check of the bytes, unless checks are deferred.

    Raises:
        ValueError: ``packed`` does not have ceil(count / 5) bytes, or ``pack`` cannot have written them.
    """
    check_size(packed, packed_size(count))  # before an array of that size is allocated
    digits = allocate(packed, count, np.uint8)
    _ternary_unpack(packed.size, packed, count, digits)
    return digits
