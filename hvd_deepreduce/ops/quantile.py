"""TODO quantile."""

from __future__ import annotations

import numpy as np

from hvd_deepreduce.ops import sort
from hvd_deepreduce.ops.deferred import check_later
from hvd_deepreduce.ops.device import array_module, f32, grid, i32, launch, scan_status, u32, u64
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import address, check, kernel
from hvd_deepreduce.ops.types import F32, U32, Device

_quantile_encode = kernel("quantile_encode", "u", "pUuippp")
_quantile_decode = kernel("quantile_decode", "I", "pUpup")


@operation()
def encode(values: F32, buckets: int, middle: bool) -> tuple[F32, U32, int]:
    """The means of up to ``buckets`` quantile buckets, each value's bucket, and how many buckets are of negative
    values; ordered as drawn in kernels/sketch/quantile.cpp. At least one value.

    On a GPU: waits for the device, twice: the signs share the buckets by their numbers.
    """
    means, codes, negative = np.empty(buckets, np.float32), np.empty(values.size, np.uint32), np.empty(1, np.uint32)
    found = _quantile_encode(
        address(values), values.size, buckets, middle, address(means), address(codes), address(negative)
    )
    if found == 0:
        raise MemoryError(f"the quantiles of {values.size} values found no memory")
    return means[:found], codes, int(negative[0])


@encode.cuda
def _(values: Device, buckets: int, middle: bool) -> tuple[Device, Device, int]:
    xp, n, file = array_module(values), values.size, "sketch/sketch"
    words, bounds = xp.empty(n, u64), xp.empty(2, u64)
    magnitudes, codes = xp.empty(n, u32), xp.empty(n, u32)
    bounds.fill(n)
    launch(xp, file, "quantile_words", grid(xp, n), values, u64(n), words)
    words = sort.radix_sort(xp, words, 0, 32)
    launch(xp, file, "quantile_bounds", grid(xp, n), words, u64(n), magnitudes, bounds)
    above_at, below_at = (int(bound) for bound in bounds.get())
    above_at = min(above_at, below_at)
    positives, negatives, zero = below_at - above_at, n - below_at, int(above_at > 0)
    # As kernels/sketch/quantile.cpp shares the buckets out.
    if zero and buckets == 2 and positives and negatives:
        above_at, positives, zero = 0, below_at, 0
    others = positives + negatives
    shared = min(buckets - zero, others)
    for_negative = (2 * shared * negatives + others) // (2 * others) if others else 0
    if positives and for_negative == shared:
        for_negative -= 1
    if negatives and for_negative == 0:
        for_negative = 1
    signs = (
        (magnitudes[below_at:], negatives, for_negative, 0),
        (magnitudes[above_at:below_at], positives, shared - for_negative, zero),
    )
    found, splits, means = xp.zeros(2, u64), [], xp.zeros(buckets, f32)
    for number, (ours, size, most, skip) in enumerate(signs):
        table = xp.zeros(2 * most + skip + 1, u32)
        splits.append(table)
        if size and most:
            launch(
                xp, file, "find_splits", grid(xp, most), ours, u64(size), u32(most), scan_status(xp, most),
                found[number:], table[skip:],
            )  # fmt: skip
    launch(xp, file, "quantile_codes", grid(xp, n), values, u64(n), *splits, found, u32(zero), codes)
    for number, (ours, size, most, skip) in enumerate(signs):
        if size and most:
            behind = u32(1 + zero if number else 0)
            launch(
                xp, file, "quantile_means", grid(xp, most, 8), ours, u64(size), splits[number][skip:], found[number:],
                u32(middle), u32(1 - number), found, behind, means,
            )  # fmt: skip
    n_below, n_above = (int(count) for count in found.get())
    return means[: n_below + zero + n_above], codes, n_below


@operation()
def decode(means: F32, codes: U32) -> F32:
    """``means[codes]``.

    On a GPU: waits for the device.
    """
    values = np.empty(codes.size, np.float32)
    check(_quantile_decode(address(codes), codes.size, address(means), means.size, address(values)))
    return values


@decode.cuda
def _(means: Device, codes: Device) -> Device:
    xp, n = array_module(codes), codes.size
    values, error = xp.empty(n, f32), xp.zeros(1, i32)
    if means.size == 0:
        check(-3)
    if n:
        launch(
            xp, "sketch/sketch", "quantile_decode", grid(xp, n), codes, u64(n), means, u32(means.size), values, error,
        )  # fmt: skip
        check_later(error)
    return values
