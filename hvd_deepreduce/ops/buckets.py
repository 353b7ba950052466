"""TODO buckets."""

from __future__ import annotations

import numpy as np

from hvd_deepreduce.ops.device import array_module, f32, f64, grid, launch, u64
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import address, kernel
from hvd_deepreduce.ops.types import F32, F64, Device

_bucket_sums = kernel("bucket_sums", "v", "pUUip")


def _sizes(count: int, bucket: int) -> F64:
    sizes = np.full(-(-count // bucket), float(bucket))
    sizes[-1:] = count - bucket * (sizes.size - 1)
    return sizes


@operation()
def bucket_sums(values: F32, bucket: int, squares: bool) -> F64:
    """The sum of magnitudes, or of squares, of each bucket, in the order that kernels/quantize/quantize.cpp says."""
    sums = np.empty(-(-values.size // bucket), np.float64)
    _bucket_sums(address(values), values.size, bucket, squares, address(sums))
    return sums


@bucket_sums.cuda
def _(values: Device, bucket: int, squares: bool) -> Device:
    xp, count, each = array_module(values), values.size, min(bucket, max(values.size, 1))
    if count == 0:
        return xp.empty(0, f64)
    terms, kernel = values, "fold_squares" if squares else "fold_magnitudes"
    while True:
        whole = (count - 1) // each
        total = whole * -(-each // 1024) + -(-(count - whole * each) // 1024)
        sums = xp.empty(total, f64)
        launch(xp, "quantize/quantize", kernel, grid(xp, total, 8), terms, u64(count), u64(each), sums)
        if each <= 1024:
            return sums
        terms, kernel, count, each = sums, "fold_sums", total, -(-each // 1024)


@operation()
def bucket_means(values: F32, bucket: int) -> F32:
    """The mean magnitude of each bucket."""
    return (bucket_sums(values, bucket, False) / _sizes(values.size, bucket)).astype(np.float32)


@bucket_means.cuda
def _(values: Device, bucket: int) -> Device:
    xp, sums = array_module(values), bucket_sums(values, bucket, False)
    means = xp.empty(sums.size, f32)
    if sums.size:
        launch(
            xp, "quantize/quantize", "bucket_means", grid(xp, sums.size), sums, u64(sums.size), u64(values.size),
            u64(bucket), means,
        )  # fmt: skip
    return means


@operation()
def clip_scales(scales: F32, values: F32, bucket: int, clip: float) -> F32:
    """Each bucket's scale, but at most ``clip`` standard deviations of its values from 0."""
    deviations = np.sqrt(bucket_sums(values, bucket, True) / _sizes(values.size, bucket))
    return np.minimum(scales, np.minimum(clip * deviations, np.finfo(np.float32).max).astype(np.float32))


@clip_scales.cuda
def _(scales: Device, values: Device, bucket: int, clip: float) -> Device:
    xp, squares = array_module(values), bucket_sums(values, bucket, True)
    clipped = xp.empty(scales.size, f32)
    if scales.size:
        launch(
            xp, "quantize/quantize", "clip_scales", grid(xp, scales.size), scales, squares, u64(scales.size),
            u64(values.size), u64(bucket), f64(clip), clipped,
        )  # fmt: skip
    return clipped
