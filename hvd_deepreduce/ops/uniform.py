"""Uniform levels between the least and the largest value of a bucket, stochastically rounded (codecs/value/uniform.py).

A bucket is a run of ``bucket_size`` consecutive values. The random numbers depend on (seed, parameter, step, rank) and
the value's place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_deepreduce.ops.deferred import generic_kernel
from hvd_deepreduce.ops.device import THREADS, allocate, array_module, cleared, for_each, key_words, launch
from hvd_deepreduce.ops.dispatch import generic, operation
from hvd_deepreduce.ops.groups import bucket_count, capped, chunk_grid
from hvd_deepreduce.ops.library import kernel
from hvd_deepreduce.ops.types import F32, Device, f32, f64, u32

_FILE = "uniform/uniform"
_uniform_encode = {w: kernel(f"uniform_encode{8 * w}", "v", "pUUuuuuupp") for w in (1, 4)}
_uniform_fit = {w: generic_kernel(_FILE, f"uniform_fit{8 * w}", "v", "pppUUup", 8) for w in (1, 4)}
_uniform_decode = {w: generic_kernel(_FILE, f"uniform_decode{8 * w}", "I", "ppUUup") for w in (1, 4)}


def code_dtype(steps: int) -> type[np.unsignedinteger[Any]]:
    """The dtype of the codes 0 to ``steps``: uint8, or uint32 if that is too narrow."""
    return np.uint8 if steps < 256 else np.uint32


@operation()
def encode(
    values: F32, bucket_size: int, steps: int, seed: int, parameter: int, step: int, rank: int
) -> tuple[F32, NDArray[Any]]:
    """The ranges of the buckets, and the values as codes within them.

    Args:
        values: float32 ``[n]``, finite.
        steps: between the least and the largest value of a bucket, 1 to 65535.

    Returns:
        ranges: float32, the least and the largest value of each bucket, two for each.
        codes: ``code_dtype(steps)`` ``[n]``, 0 to ``steps``.
    """
    ranges = np.empty(2 * bucket_count(values.size, bucket_size), np.float32)
    codes = np.empty(values.size, code_dtype(steps))
    _uniform_encode[codes.itemsize](values, values.size, bucket_size, steps, seed, parameter, step, rank, ranges, codes)
    return ranges, codes


@encode.cuda
def _(
    values: Device, bucket_size: int, steps: int, seed: int, parameter: int, step: int, rank: int
) -> tuple[Device, Device]:
    xp, n = array_module(values), values.size
    size = capped(bucket_size, n)
    buckets = bucket_count(n, size)
    extremes, ranges, scales = cleared(xp, 2 * buckets, u32), xp.empty(2 * buckets, f32), xp.empty(buckets, f64)
    codes = xp.empty(n, code_dtype(steps))
    if n:
        blocks = chunk_grid(xp, n, size)
        launch(xp, _FILE, "uniform_extremes", blocks, values, n, size, extremes)
        for_each(xp, _FILE, "uniform_ranges", buckets, extremes, buckets, u32(steps), ranges, scales)
        for_each(
            xp, _FILE, f"uniform_encode{8 * codes.itemsize}", n, values, n, size, u32(steps),
            *key_words(seed, parameter, step, rank), ranges, scales, codes, tile=4 * THREADS,
        )  # fmt: skip
    return ranges, codes


@generic
def fit_ranges(values: F32, codes: NDArray[Any], ranges: F32, bucket_size: int, steps: int) -> F32:
    """For each bucket, the range with which the decoded codes have the least squared distance to the values.

    The distance is then at most that of the values to their mean, whatever the codes are.

    Args:
        values: float32 ``[n]``, finite.
        codes: of ``encode``.
        ranges: of ``encode``.

    Returns:
        float32, two for each bucket.
    """
    n = values.size
    fitted = allocate(values, ranges.size, np.float32)
    _uniform_fit[codes.itemsize](
        ranges.size // 2, values, codes, ranges, n, capped(bucket_size, n), steps, fitted
    )
    return fitted


@generic
def decode(ranges: F32, codes: NDArray[Any], bucket_size: int, steps: int) -> F32:
    """The values of ``encode``: float32 ``[n]``.

    On a GPU, the host waits for the check of the ranges, unless checks are deferred.

    Args:
        codes: 0 to ``steps``; this is not checked.

    Raises:
        ValueError: a range is not finite, or its least value is above its largest.
    """
    n = codes.size
    values = allocate(codes, n, np.float32)
    _uniform_decode[codes.itemsize](n, codes, ranges, n, capped(bucket_size, n), steps, values)
    return values
