"""TODO uniform."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_deepreduce.ops.deferred import decode_values
from hvd_deepreduce.ops.device import THREADS, array_module, f32, grid, key_words, launch, u32, u64
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import address, check, kernel
from hvd_deepreduce.ops.types import F32, Device

_uniform_encode = {w: kernel(f"uniform_encode{8 * w}", "v", "pUUuuuupp") for w in (1, 2)}
_uniform_decode = {w: kernel(f"uniform_decode{8 * w}", "I", "ppUUp") for w in (1, 2)}


@operation()
def encode(
    values: F32, bucket: int, dtype: type[np.unsignedinteger[Any]], seed: int, parameter: int, step: int, rank: int
) -> tuple[F32, NDArray[Any]]:
    """Each bucket's least and largest value, and codes between them that use all of ``dtype`` (uint8 or uint16)."""
    ranges, codes = np.empty(2 * -(-values.size // bucket), np.float32), np.empty(values.size, dtype)
    _uniform_encode[codes.itemsize](
        address(values), values.size, bucket, seed, parameter, step, rank, address(ranges), address(codes)
    )
    return ranges, codes


@encode.cuda
def _(
    values: Device, bucket: int, dtype: type[np.unsignedinteger[Any]], seed: int, parameter: int, step: int, rank: int
) -> tuple[Device, Device]:
    xp, n = array_module(values), values.size
    bucket = min(bucket, max(n, 1))
    buckets = -(-n // bucket)
    extremes, ranges, codes = xp.zeros(2 * buckets, u32), xp.empty(2 * buckets, f32), xp.empty(n, dtype)
    if n:
        chunks = buckets * -(-bucket // (16 * THREADS))
        launch(xp, "quantize/quantize", "uniform_extremes", grid(xp, chunks, 1), values, u64(n), u64(bucket), extremes)
        launch(
            xp, "quantize/quantize", f"uniform_encode{8 * codes.itemsize}", grid(xp, n, 4 * THREADS), values, u64(n),
            u64(bucket), *key_words(seed, parameter, step, rank), extremes, ranges, codes,
        )  # fmt: skip
    return ranges, codes


@operation()
def decode(ranges: F32, codes: NDArray[Any], bucket: int) -> F32:
    """The values of ``uniform_encode``.

    On a GPU: waits for the device.
    """
    values = np.empty(codes.size, np.float32)
    check(_uniform_decode[codes.itemsize](address(codes), address(ranges), codes.size, bucket, address(values)))
    return values


@decode.cuda
def _(ranges: Device, codes: Device, bucket: int) -> Device:
    n, kernel = codes.size, f"uniform_decode{8 * codes.itemsize}"
    return decode_values("quantize/quantize", kernel, codes, n, codes, ranges, u64(n), u64(min(bucket, max(n, 1))))
