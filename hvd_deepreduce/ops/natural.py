"""Natural compression: values rounded to powers of two, as float32 exponents of one byte each (value/natural.py)."""

from __future__ import annotations

import numpy as np

from hvd_deepreduce.ops.deferred import decode_values
from hvd_deepreduce.ops.device import THREADS, array_module, grid, key_words, launch, u64
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import address, check, kernel
from hvd_deepreduce.ops.types import F32, U8, Device

_natural_encode = kernel("natural_encode", "v", "pUuuuup")
_natural_decode = kernel("natural_decode", "I", "ppUp")


@operation()
def encode(values: F32, seed: int, parameter: int, step: int, rank: int) -> U8:
    """The float32 exponent field, 0 to 254, of the power of two that each magnitude is rounded to; 0 for 0.

    The random numbers depend on (seed, parameter, step, rank) and the value's place.

    Args:
        values: float32 ``[n]``, finite.

    Returns:
        uint8 ``[n]``.
    """
    exponents = np.empty(values.size, np.uint8)
    _natural_encode(address(values), values.size, seed, parameter, step, rank, address(exponents))
    return exponents


@encode.cuda
def _(values: Device, seed: int, parameter: int, step: int, rank: int) -> Device:
    xp, n = array_module(values), values.size
    exponents = xp.empty(n, np.uint8)
    if n:
        launch(
            xp, "natural/natural", "natural_encode", grid(xp, n, 4 * THREADS), values, u64(n), *key_words(seed,
            parameter, step, rank), exponents,
        )  # fmt: skip
    return exponents


@operation()
def decode(signs: U8, exponents: U8) -> F32:
    """Powers of two, float32 ``[n]``, with the signs of ``sign.encode`` and the exponents ``[n]`` of ``encode``.

    On a GPU, the host waits for the check of the exponents, unless checks are deferred.

    Raises:
        ValueError: an exponent is 255.
    """
    values = np.empty(exponents.size, np.float32)
    check(_natural_decode(address(signs), address(exponents), exponents.size, address(values)))
    return values


@decode.cuda
def _(signs: Device, exponents: Device) -> Device:
    n = exponents.size
    return decode_values("natural/natural", "natural_decode", exponents, n, signs, exponents, u64(n))
