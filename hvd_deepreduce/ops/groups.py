"""Buckets of values: norms, sums, means, and scales clipped by the deviation.

A bucket is a run of ``bucket_size`` consecutive values; the last one has what is left. All operations return one number
for each of the ``ceil(values.size / bucket_size)`` buckets. Sums are computed in float64, in an order that
kernels/buckets/buckets.h defines, so host and GPU return the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hvd_deepreduce.ops.device import THREADS, array_module, cleared, f32, f64, grid, launch, u32, u64
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import address, kernel
from hvd_deepreduce.ops.types import F32, F64, Device

_bucket_norms = kernel("bucket_norms", "v", "pUUip")
_bucket_sums = kernel("bucket_sums", "v", "pUUip")
_bucket_means = kernel("bucket_means", "v", "pUUp")
_clip_scales = kernel("clip_scales", "v", "ppUUdp")
_folded_terms = kernel("folded_terms", "U", "UU")


def bucket_count(count: int, bucket_size: int) -> int:
    """The number of buckets of ``count`` values."""
    return -(-count // bucket_size)


def capped(bucket_size: int, count: int) -> int:
    """``bucket_size`` for a CUDA kernel of ``count`` values: at most ``count``, at least 1, so that it fits 32 bits."""
    return min(bucket_size, max(count, 1))


def chunk_grid(xp: Any, count: int, bucket_size: int) -> int:
    """The number of blocks for a kernel that uses ``each_chunk`` of kernels/buckets/buckets.cuh."""
    return grid(xp, bucket_count(count, bucket_size) * bucket_count(bucket_size, 16 * THREADS), 1)


@operation()
def norms(values: F32, bucket_size: int, l2: bool) -> F32:
    """The norm of each bucket.

    Args:
        values: float32, finite.
        bucket_size: at least 1.
        l2: the l2 norm, at most the largest float32; else the largest magnitude.
    """
    out = np.empty(bucket_count(values.size, bucket_size), np.float32)
    _bucket_norms(address(values), values.size, bucket_size, l2, address(out))
    return out


@norms.cuda
def _(values: Device, bucket_size: int, l2: bool) -> Device:
    xp, n = array_module(values), values.size
    size = capped(bucket_size, n)
    out = cleared(xp, bucket_count(n, size), f32)
    if l2 and n:
        launch(xp, "buckets/buckets", "l2_norms", grid(xp, out.size, 8), values, u64(n), u64(size), out)
    elif n:
        blocks = chunk_grid(xp, n, size)
        launch(xp, "buckets/buckets", "max_norms", blocks, values, u64(n), u64(size), out.view(u32))
    return out


@operation()
def sums(values: F32, bucket_size: int, squares: bool) -> F64:
    """The float64 sum of each bucket's squares, or magnitudes if not ``squares``. ``values``: float32, finite."""
    out = np.empty(bucket_count(values.size, bucket_size), np.float64)
    _bucket_sums(address(values), values.size, bucket_size, squares, address(out))
    return out


@sums.cuda
def _(values: Device, bucket_size: int, squares: bool) -> Device:
    xp, count = array_module(values), values.size
    per_bucket = capped(bucket_size, count)
    buckets = bucket_count(count, per_bucket)
    if count == 0:
        return xp.empty(0, f64)
    terms, kernel = values, "fold_squares" if squares else "fold_magnitudes"
    while True:  # a level of the sum, see kernels/buckets/buckets.h
        total = _folded_terms(count, per_bucket)
        out = xp.empty(total, f64)
        launch(xp, "buckets/buckets", kernel, grid(xp, total, 8), terms, u64(count), u64(per_bucket), out)
        if total == buckets:
            return out
        terms, kernel, count, per_bucket = out, "fold_sums", total, _folded_terms(per_bucket, per_bucket)


@operation()
def means(values: F32, bucket_size: int) -> F32:
    """The float32 mean of each bucket's magnitudes. ``values``: float32, finite."""
    totals = sums.host(values, bucket_size, False)
    out = np.empty(totals.size, np.float32)
    _bucket_means(address(totals), values.size, bucket_size, address(out))
    return out


@means.cuda
def _(values: Device, bucket_size: int) -> Device:
    xp, n, totals = array_module(values), values.size, sums(values, bucket_size, False)
    out = xp.empty(totals.size, f32)
    if n:
        launch(xp, "buckets/buckets", "bucket_means", grid(xp, totals.size), totals, u64(n), u64(bucket_size), out)
    return out


@operation()
def clip_scales(scales: F32, values: F32, bucket_size: int, clip: float) -> F32:
    """The smaller of each bucket's scale and ``clip`` standard deviations of its values, the deviation measured from 0.

    Args:
        scales: float32, one for each bucket.
        values: float32, finite.
    """
    squares = sums.host(values, bucket_size, True)
    out = np.empty_like(scales)
    _clip_scales(address(scales), address(squares), values.size, bucket_size, clip, address(out))
    return out


@clip_scales.cuda
def _(scales: Device, values: Device, bucket_size: int, clip: float) -> Device:
    xp, n, squares = array_module(values), values.size, sums(values, bucket_size, True)
    out = xp.empty(scales.size, f32)
    if n:
        launch(
            xp, "buckets/buckets", "clip_scales", grid(xp, out.size), scales, squares, u64(n), u64(bucket_size),
            f64(clip), out,
        )  # fmt: skip
    return out
