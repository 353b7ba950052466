"""Natural compression: values rounded to powers of two, as float32 exponents of one byte each (value/natural.py)."""

from __future__ import annotations

import numpy as np

from hvd_deepreduce.ops.deferred import generic_kernel
from hvd_deepreduce.ops.device import THREADS, allocate
from hvd_deepreduce.ops.dispatch import generic
from hvd_deepreduce.ops.types import F32, U8

_FILE = "natural/natural"
_natural_encode = generic_kernel(_FILE, "natural_encode", "v", "pUuuuup", 4 * THREADS)
_natural_decode = generic_kernel(_FILE, "natural_decode", "I", "ppUp")


@generic
def encode(values: F32, seed: int, parameter: int, step: int, rank: int) -> U8:
    """The float32 exponent field, 0 to 254, of the power of two that each magnitude is rounded to; 0 for 0.

    The random numbers depend on (seed, parameter, step, rank) and the value's place.

    Args:
        values: float32 ``[n]``, finite.

    Returns:
        uint8 ``[n]``.
    """
    n = values.size
    exponents = allocate(values, n, np.uint8)
    _natural_encode(n, values, n, seed, parameter, step, rank, exponents)
    return exponents


@generic
def decode(signs: U8, exponents: U8) -> F32:
    """Powers of two, float32 ``[n]``, with the signs of ``sign.encode`` and the exponents ``[n]`` of ``encode``.

    On a GPU, the host waits for the check of the exponents, unless checks are deferred.

    Raises:
        ValueError: an exponent is 255.
    """
    n = exponents.size
    values = allocate(exponents, n, np.float32)
    _natural_decode(n, signs, exponents, n, values)
    return values
