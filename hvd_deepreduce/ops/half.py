"""Values in 16 bits: IEEE float16 or bfloat16 (codecs/value/half.py)."""

from __future__ import annotations

import numpy as np

from hvd_deepreduce.ops import arrays
from hvd_deepreduce.ops.deferred import decode_values
from hvd_deepreduce.ops.device import array_module, grid, launch, u32, u64
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import address, check, check_size, kernel
from hvd_deepreduce.ops.types import F32, U8, Device, Floats

_half_encode = kernel("half_encode", "v", "pUip")
_half_decode = kernel("half_decode", "I", "pUp")


@operation()
def encode(values: Floats, bfloat16: bool) -> U8:
    """The section ``| 0 float16 or 1 bfloat16, u16 | values, 16 bits each |``.

    Rounds to nearest, ties to even; a value beyond the format's range becomes its largest number.

    Args:
        values: float32 or float64 ``[n]``, finite; float64 is rounded to float32 first.

    Returns:
        uint8 ``[2 * (n + 1)]``.
    """
    x = arrays.to_float32.host(values)
    section = np.empty(2 * (x.size + 1), np.uint8)
    _half_encode(address(x), x.size, bfloat16, address(section))
    return section


@encode.cuda
def _(values: Device, bfloat16: bool) -> Device:
    xp, n = array_module(values), values.size
    section = xp.empty(n + 1, np.uint16)
    x = arrays.to_float32(values)
    launch(xp, "half/half", "half_encode", grid(xp, n + 1), x, u64(n), u32(bfloat16), section)
    return section.view(np.uint8)


@operation()
def decode(section: U8, count: int) -> F32:
    """The ``count`` float32 values of ``encode``.

    On a GPU, the host waits for the check of the values, unless checks are deferred.

    Raises:
        ValueError: the section does not have 2 * (count + 1) bytes, its format is unknown, or a value is not finite.
    """
    check_size(section, 2 * (count + 1))
    if section[0] > 1 or section[1]:
        number = int.from_bytes(section[:2].tobytes(), "little")
        raise ValueError(f"its 16-bit format must be 0 (float16) or 1 (bfloat16), not {number}")
    values = np.empty(count, np.float32)
    check(_half_decode(address(section), count, address(values)))
    return values


@decode.cuda
def _(section: Device, count: int) -> Device:
    check_size(section, 2 * (count + 1))
    return decode_values("half/half", "half_decode", section, count, section.view(np.uint16), u64(count))
