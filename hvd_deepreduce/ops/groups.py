"""Buckets of values: norms, sums, means, and scales clipped by the deviation.

A bucket is a run of ``bucket_size`` consecutive values; the last one has what is left. All operations return one number
for each of the ``ceil(values.size / bucket_size)`` buckets. Sums are computed in float64, in an order that
kernels/buckets/buckets.h defines, so host and GPU return the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hvd_deepreduce.ops.deferred import generic_kernel
from hvd_deepreduce.ops.device import THREADS, allocate, array_module, cleared, for_each, grid, launch
from hvd_deepreduce.ops.dispatch import generic, operation
from hvd_deepreduce.ops.library import kernel
from hvd_deepreduce.ops.types import F32, F64, Device, f32, f64, u32

_bucket_norms = kernel("bucket_norms", "v", "pUUip")
_bucket_sums = kernel("bucket_sums", "v", "pUUip")
_bucket_means = generic_kernel("buckets/buckets", "bucket_means", "v", "pUUp")
_clip_scales = generic_kernel("buckets/buckets", "clip_scales", "v", "ppUUdp")
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
    _bucket_norms(values, values.size, bucket_size, l2, out)
    return out


@norms.cuda
def _(values: Device, bucket_size: int, l2: bool) -> Device:
    xp, n = array_module(values), values.size
    size = capped(bucket_size, n)
    out = cleared(xp, bucket_count(n, size), f32)
    if l2 and n:
        for_each(xp, "buckets/buckets", "l2_norms", out.size, values, n, size, out, tile=8)
    elif n:
        blocks = chunk_grid(xp, n, size)
        launch(xp, "buckets/buckets", "max_norms", blocks, values, n, size, out.view(u32))
    return out


@operation()
def sums(values: F32, bucket_size: int, squares: bool) -> F64:
    """The float64 sum of each bucket's squares, or magnitudes if not ``squares``. ``values``: float32, finite."""
    out = np.empty(bucket_count(values.size, bucket_size), np.float64)
    _bucket_sums(values, values.size, bucket_size, squares, out)
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
        for_each(xp, "buckets/buckets", kernel, total, terms, count, per_bucket, out, tile=8)
        if total == buckets:
            return out
        terms, kernel, count, per_bucket = out, "fold_sums", total, _folded_terms(per_bucket, per_bucket)


@generic
def means(values: F32, bucket_size: int) -> F32:
    """The float32 mean of each bucket's magnitudes. ``values``: float32, finite."""
    totals = sums(values, bucket_size, False)
    out = allocate(values, totals.size, np.float32)
    _bucket_means(out.size, totals, values.size, bucket_size, out)
    return out


@generic
def clip_scales(scales: F32, values: F32, bucket_size: int, clip: float) -> F32:
    """The smaller of each bucket's scale and ``clip`` standard deviations of its values, the deviation measured from 0.

    Args:
        scales: float32, one for each bucket.
        values: float32, finite.
    """
    squares = sums(values, bucket_size, True)
    out = allocate(values, scales.size, np.float32)
    _clip_scales(out.size, scales, squares, values.size, bucket_size, clip, out)
    return out
