"""Values in 16 bits: IEEE float16 or bfloat16 (codecs/value/half.py)."""

from __future__ import annotations

import numpy as np

from hvd_deepreduce.ops import arrays
from hvd_deepreduce.ops.deferred import decode_values, generic_kernel
from hvd_deepreduce.ops.device import allocate
from hvd_deepreduce.ops.dispatch import generic, operation
from hvd_deepreduce.ops.library import check, check_size, kernel
from hvd_deepreduce.ops.types import F32, U8, Device, Floats, u64

_half_encode = generic_kernel("half/half", "half_encode", "v", "pUip")
_half_decode = kernel("half_decode", "I", "pUp")


@generic
def encode(values: Floats, bfloat16: bool) -> U8:
    """The section ``| 0 float16 or 1 bfloat16, u16 | values, 16 bits each |``.

    Rounds to nearest, ties to even; a value beyond the format's range becomes its largest number.

    Args:
        values: float32 or float64 ``[n]``, finite; float64 is rounded to float32 first.

    Returns:
        uint8 ``[2 * (n + 1)]``.
    """
    x, n = arrays.to_float32(values), values.size
    section = allocate(values, n + 1, np.uint16)
    _half_encode(n + 1, x, n, bfloat16, section)
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
    check(_half_decode(section, count, values))
    return values


@decode.cuda
def _(section: Device, count: int) -> Device:
    check_size(section, 2 * (count + 1))
    return decode_values("half/half", "half_decode", section, count, section.view(np.uint16), u64(count))
