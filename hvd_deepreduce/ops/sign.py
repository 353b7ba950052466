"""Signs, a bit each, and values of one magnitude per bucket (codecs/value/sign.py, codecs/value/natural.py)."""

from __future__ import annotations

import numpy as np

from hvd_deepreduce.ops.deferred import decode_values
from hvd_deepreduce.ops.device import array_module, grid, launch, u32, u64
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.groups import capped
from hvd_deepreduce.ops.library import address, check, kernel
from hvd_deepreduce.ops.types import F32, U8, Device

_sign_encode = kernel("sign_encode", "v", "pUp")
_sign_decode = kernel("sign_decode", "I", "ppUUp")


@operation()
def encode(values: F32) -> U8:
    """One bit for each float32 value, set if it is below zero: uint8 ``[ceil(n / 8)]``.

    Bit i % 8 of byte i / 8 belongs to value i; the bits after the last value are zero.
    """
    signs = np.empty((values.size + 7) // 8, np.uint8)
    _sign_encode(address(values), values.size, address(signs))
    return signs


@encode.cuda
def _(values: Device) -> Device:
    xp, n = array_module(values), values.size
    words = xp.empty(-(-n // 32), u32)
    if n:
        launch(xp, "sign/sign", "sign_encode", grid(xp, n), values, u64(n), words)
    return words.view(np.uint8)[: (n + 7) // 8]


@operation()
def decode(signs: U8, scales: F32, count: int, bucket_size: int) -> F32:
    """``count`` float32 values: the scale of each value's bucket, with the signs of ``encode``.

    On a GPU, the host waits for the check of the scales, unless checks are deferred.

    Args:
        signs: uint8 ``[ceil(count / 8)]``.
        scales: float32, one for each bucket of ``bucket_size`` values.

    Raises:
        ValueError: a scale is negative or not finite.
    """
    values = np.empty(count, np.float32)
    check(_sign_decode(address(signs), address(scales), count, bucket_size, address(values)))
    return values


@decode.cuda
def _(signs: Device, scales: Device, count: int, bucket_size: int) -> Device:
    if bucket_size == 0:
        check(-3)
    arguments = signs, scales, u64(count), u64(capped(bucket_size, count))
    return decode_values("sign/sign", "sign_decode", signs, count, *arguments)
