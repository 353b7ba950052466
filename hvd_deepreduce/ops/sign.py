"""Signs, a bit each, and values of one magnitude per bucket (codecs/value/sign.py, codecs/value/natural.py)."""

from __future__ import annotations

import numpy as np

from hvd_deepreduce.ops.deferred import generic_kernel
from hvd_deepreduce.ops.device import allocate
from hvd_deepreduce.ops.dispatch import generic
from hvd_deepreduce.ops.groups import capped
from hvd_deepreduce.ops.library import check
from hvd_deepreduce.ops.types import F32, U8

_FILE = "sign/sign"
_sign_encode = generic_kernel(_FILE, "sign_encode", "v", "pUp")
_sign_decode = generic_kernel(_FILE, "sign_decode", "I", "ppUUp")


@generic
def encode(values: F32) -> U8:
    """One bit for each float32 value, set if it is below zero: uint8 ``[ceil(n / 8)]``.

    Bit i % 8 of byte i / 8 belongs to value i; the bits after the last value are zero.
    """
    n = values.size
    signs = allocate(values, -(-n // 32), np.uint32)
    _sign_encode(n, values, n, signs)
    return signs.view(np.uint8)[: (n + 7) // 8]


@generic
def decode(signs: U8, scales: F32, count: int, bucket_size: int) -> F32:
    """``count`` float32 values: the scale of each value's bucket, with the signs of ``encode``.

    On a GPU, the host waits for the check of the scales, unless checks are deferred.

    Args:
        signs: uint8 ``[ceil(count / 8)]``.
        scales: float32, one for each bucket of ``bucket_size`` values.

    Raises:
        ValueError: a scale is negative or not finite.
    """
    if bucket_size == 0:
        check(-3)
    values = allocate(signs, count, np.float32)
    _sign_decode(count, signs, scales, count, capped(bucket_size, count), values)
    return values
