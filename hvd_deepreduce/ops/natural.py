"""TODO natural."""

from __future__ import annotations

import numpy as np

from hvd_deepreduce.ops.deferred import decode_values
from hvd_deepreduce.ops.device import THREADS, array_module, grid, key_words, launch, u64
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import address, check, kernel
from hvd_deepreduce.ops.types import F32, U8, Device

_natural_exponents = kernel("natural_exponents", "v", "pUuuuup")
_natural_decode = kernel("natural_decode", "I", "ppUp")


@operation()
def encode(values: F32, seed: int, parameter: int, step: int, rank: int) -> U8:
    """The float32 exponent field of the power of two that each magnitude is rounded to."""
    exponents = np.empty(values.size, np.uint8)
    _natural_exponents(address(values), values.size, seed, parameter, step, rank, address(exponents))
    return exponents


@encode.cuda
def _(values: Device, seed: int, parameter: int, step: int, rank: int) -> Device:
    xp, n = array_module(values), values.size
    exponents = xp.empty(n, np.uint8)
    if n:
        launch(
            xp, "quantize/quantize", "natural_exponents", grid(xp, n, 4 * THREADS), values, u64(n), *key_words(seed,
            parameter, step, rank), exponents,
        )  # fmt: skip
    return exponents


@operation()
def decode(signs: U8, exponents: U8) -> F32:
    """Powers of two with the signs of ``signs``.

    On a GPU: waits for the device.
    """
    values = np.empty(exponents.size, np.float32)
    check(_natural_decode(address(signs), address(exponents), exponents.size, address(values)))
    return values


@decode.cuda
def _(signs: Device, exponents: Device) -> Device:
    return decode_values(
        "quantize/quantize", "natural_decode", exponents, exponents.size, signs, exponents, u64(exponents.size),
    )  # fmt: skip
