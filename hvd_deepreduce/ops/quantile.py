"""Quantile buckets: each value's bucket, and the buckets' means (value/quantile.py, joint/minmax_sketch.py).

Buckets are numbered by sign, and within a sign by magnitude; kernels/quantile/quantile.h draws their order. Without
separate signs, they are numbered from the least value to the largest.
"""

from __future__ import annotations

import numpy as np

from hvd_deepreduce.ops import arrays, sort
from hvd_deepreduce.ops import lloyd as histograms
from hvd_deepreduce.ops.deferred import generic_kernel
from hvd_deepreduce.ops.device import allocate, array_module, cleared, for_each, scan_status
from hvd_deepreduce.ops.dispatch import generic, operation
from hvd_deepreduce.ops.library import check, kernel
from hvd_deepreduce.ops.types import F32, U32, Device, f32, u32, u64

_FILE = "quantile/quantile"
_quantile_shares = kernel("quantile_shares", "v", "UUUup")
_quantile_encode = kernel("quantile_encode", "u", "pUuippp")
_quantile_encode_ordered = kernel("quantile_encode_ordered", "u", "pUuipp")
_quantile_decode = generic_kernel(_FILE, "quantile_decode", "I", "pUpup")


@operation()
def encode(values: F32, buckets: int, middle: bool, separate_signs: bool = True) -> tuple[F32, U32, int]:
    """The quantile bucket of each value.

    On a GPU, the host waits for the device twice: for the numbers of values of each sign, by which the signs share the
    buckets, and for the number of different buckets; once without separate signs.

    Args:
        values: float32 ``[n]``, finite, at least one.
        buckets: the most of them, 2 to 65536.
        middle: decode a bucket to the middle between its quantiles; else to the mean of its values.
        separate_signs: give negative values, zeros and positive values buckets of their own.

    Returns:
        means: float32, what each bucket is decoded to.
        codes: uint32 ``[n]``, each value's bucket.
        negative: the number of buckets of negative values; 0 without separate signs.

    Raises:
        MemoryError: the host has too little memory to sort the values.
    """
    means, codes, negative = np.empty(buckets, np.float32), np.empty(values.size, np.uint32), np.zeros(1, np.uint32)
    arguments = values, values.size, buckets, middle, means, codes
    if separate_signs:
        used = _quantile_encode(*arguments, negative)
    else:
        used = _quantile_encode_ordered(*arguments)
    if used == 0:
        raise MemoryError(f"not enough memory for the quantiles of {values.size} values")
    return means[:used], codes, int(negative[0])


@encode.cuda
def _(values: Device, buckets: int, middle: bool, separate_signs: bool = True) -> tuple[Device, Device, int]:
    if not separate_signs:
        return (*_encode_ordered(values, buckets, middle), 0)
    xp, n, file = array_module(values), values.size, _FILE
    words, bounds = xp.empty(n, u64), xp.empty(2, u64)
    magnitudes, codes = xp.empty(n, u32), xp.empty(n, u32)
    bounds.fill(n)
    for_each(xp, file, "quantile_words", n, values, n, words)
    words = sort.radix_sort(xp, words, 0, 32)
    for_each(xp, file, "quantile_bounds", n, words, n, magnitudes, bounds)
    first_nonzero, first_negative = (int(bound) for bound in bounds.get())
    zeros = min(first_nonzero, first_negative)
    shares = np.empty(3, np.uint32)
    _quantile_shares(n - first_negative, zeros, first_negative - zeros, buckets, shares)
    zero, most_negative, most_positive = shares.tolist()
    signs = (
        (magnitudes[first_negative:], most_negative, 0),
        (magnitudes[zeros if zero else 0 : first_negative], most_positive, zero),
    )
    # Each sign's table of splits; that of the positive values begins with zeros' own split, 0.
    counts, tables, means = cleared(xp, 2, u64), [], cleared(xp, buckets, f32)
    for sign, (of_sign, most, skip) in enumerate(signs):
        table = cleared(xp, 2 * most + skip + 1, u32)
        tables.append(table)
        if of_sign.size and most:
            for_each(
                xp, file, "find_splits", most, of_sign, of_sign.size, u32(most), scan_status(xp, most), counts[sign:],
                table[skip:],
            )  # fmt: skip
    for_each(xp, file, "quantile_codes", n, values, n, *tables, counts, u32(zero), codes)
    for sign, (of_sign, most, skip) in enumerate(signs):
        if of_sign.size and most:
            for_each(
                xp, file, "quantile_means", most, of_sign, of_sign.size, tables[sign][skip:], counts[sign:],
                u32(middle), u32(sign == 0), counts, u32(zero), means, tile=8,
            )  # fmt: skip
    negative, positive = (int(count) for count in counts.get())
    return means[: negative + zero + positive], codes, negative


def _encode_ordered(values: Device, buckets: int, middle: bool) -> tuple[Device, Device]:
    """Means and codes without separate signs."""
    xp, n = array_module(values), values.size
    buckets = min(buckets, n)
    words, found = xp.empty(n, u64), cleared(xp, 1, u64)
    sorted_words, codes = xp.empty(n, u32), xp.empty(n, u32)
    splits, means = cleared(xp, 2 * buckets + 1, u32), cleared(xp, buckets, f32)
    for_each(xp, _FILE, "ordered_words", n, values, n, words)
    words = sort.radix_sort(xp, words, 0, 32)
    for_each(xp, _FILE, "low_halves", n, words, n, sorted_words)
    for_each(xp, _FILE, "find_splits", buckets, sorted_words, n, u32(buckets), scan_status(xp, buckets), found, splits)
    for_each(xp, _FILE, "ordered_codes", n, values, n, splits, found, codes)
    for_each(xp, _FILE, "ordered_means", buckets, sorted_words, n, splits, found, u32(middle), means, tile=8)
    return means[: int(found.get()[0])], codes


def lloyd(values: F32, buckets: int) -> tuple[F32, U32]:
    """As ``encode`` with separate signs, with the splits of least squared error in place of quantiles.

    Zeros count as positive values. On a GPU, the host waits for the device once.

    Returns:
        means: as of ``encode``, on the device of ``values``.
        codes: as of ``encode``.
    """
    counts, sums = histograms.histogram(values)
    signs = [slice(histograms.SIGN_BINS, None), slice(histograms.SIGN_BINS)]
    negatives = int(counts[signs[0]].sum())
    shares = np.empty(3, np.uint32)
    _quantile_shares(negatives, 0, values.size - negatives, buckets, shares)
    (below, down), (above, up) = (
        histograms.splits(counts[sign], sums[sign], most)
        for sign, most in zip(signs, shares[1:].tolist(), strict=True)
    )
    means = np.concatenate([-down, up]).astype(np.float32)
    return arrays.move_like(means, values), histograms.codes(values, below, above)


@generic
def decode(means: F32, codes: U32) -> F32:
    """The mean of each code's bucket, ``means[codes]``: float32 ``[n]``.

    On a GPU, the host waits for the check of the codes, unless checks are deferred.

    Raises:
        ValueError: a code is not below ``means.size``.
    """
    if means.size == 0 and codes.size:
        check(-3)
    values = allocate(codes, codes.size, np.float32)
    _quantile_decode(codes.size, codes, codes.size, means, means.size, values)
    return values
