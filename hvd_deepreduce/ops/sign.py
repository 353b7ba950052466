"""TODO sign."""

from __future__ import annotations

import numpy as np

from hvd_deepreduce.ops.deferred import decode_values
from hvd_deepreduce.ops.device import array_module, grid, launch, u32, u64
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import address, check, kernel
from hvd_deepreduce.ops.types import F32, U8, Device

_signs = kernel("signs", "v", "pUp")
_sign_decode = kernel("sign_decode", "I", "ppUUp")


@operation()
def encode(values: F32) -> U8:
    """One bit a value, set where it is below zero."""
    out = np.empty((values.size + 7) // 8, np.uint8)
    _signs(address(values), values.size, address(out))
    return out


@encode.cuda
def _(values: Device) -> Device:
    xp, n = array_module(values), values.size
    words = xp.empty(-(-n // 32), u32)
    if n:
        launch(xp, "quantize/quantize", "signs", grid(xp, n), values, u64(n), words)
    return words.view(np.uint8)[: (n + 7) // 8]


@operation()
def decode(signs: U8, scales: F32, count: int, bucket: int) -> F32:
    """Each bucket's scale with the signs of ``signs``.

    On a GPU: waits for the device.
    """
    values = np.empty(count, np.float32)
    check(_sign_decode(address(signs), address(scales), count, bucket, address(values)))
    return values


@decode.cuda
def _(signs: Device, scales: Device, count: int, bucket: int) -> Device:
    if bucket == 0:
        check(-3)
    return decode_values(
        "quantize/quantize", "sign_decode", signs, count, signs, scales, u64(count), u64(min(bucket, max(count, 1))),
    )  # fmt: skip
