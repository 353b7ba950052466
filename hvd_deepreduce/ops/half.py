"""TODO half."""

from __future__ import annotations

import numpy as np

from hvd_deepreduce.ops import arrays, deferred
from hvd_deepreduce.ops.deferred import decode_values
from hvd_deepreduce.ops.device import array_module, grid, launch, u32, u64
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import check
from hvd_deepreduce.ops.types import F32, U8, U16, Device, Floats


def _to_bfloat16(values: F32) -> U16:
    """The upper 16 bits of each float32, rounded to nearest, ties to even; never up to infinity."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where((rounded & 0x7FFF) == 0x7F80, rounded - 1, rounded).astype(np.uint16)


@operation()
def encode(values: Floats, bfloat16: bool) -> U8:
    """The section of value/half.py."""
    section = np.zeros(values.size + 1, np.uint16)
    limit = np.finfo(np.float32 if bfloat16 else np.float16).max
    clipped = np.clip(values, -limit, limit).astype(np.float32)
    section[0] = bfloat16
    section[1:] = _to_bfloat16(clipped) if bfloat16 else clipped.astype(np.float16).view(np.uint16)
    return section.view(np.uint8)


@encode.cuda
def _(values: Device, bfloat16: bool) -> Device:
    xp, n = array_module(values), values.size
    section = xp.empty(n + 1, np.uint16)
    narrow = arrays.to_float32(values)
    launch(xp, "quantize/quantize", "half_encode", grid(xp, n + 1), narrow, u64(n), u32(bfloat16), section)
    return section.view(np.uint8)


@operation()
def decode(section: U8, count: int) -> F32:
    """The ``count`` values of ``half_encode``; ``section`` has 2 * (count + 1) bytes.

    On a GPU: waits for the device.
    """
    words = section.view(np.uint16)
    if words[0] > 1:
        raise ValueError(f"the 16-bit format is 0 (float16) or 1 (bfloat16), not {words[0]}")
    values: F32
    if words[0] == 0:
        values = words[1:].view(np.float16).astype(np.float32)
    else:
        values = (words[1:].astype(np.uint32) << 16).view(np.float32)
    deferred.check_finite(values)
    return values


@decode.cuda
def _(section: Device, count: int) -> Device:
    if section.size != 2 * (count + 1):
        check(-1)
    return decode_values("quantize/quantize", "half_decode", section, count, section.view(np.uint16), u64(count))
