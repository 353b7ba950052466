"""Splits of least squared error, by Lloyd's algorithm on a histogram of the values (codecs/value/quantile.py).

Lloyd, "Least squares quantization in PCM", 1957 (IEEE Transactions on Information Theory, 1982). The histogram is exact
in integers and small, so host and GPU find the same splits from it.
"""

from __future__ import annotations

from bisect import bisect_right
from math import fsum

import numpy as np
from numpy.typing import NDArray

from hvd_deepreduce.ops.device import array_module, cleared, for_each
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import kernel
from hvd_deepreduce.ops.types import F32, U32, Device, u32, u64

_bins = kernel("quantile_bins", "v", "pUpp")
_codes = kernel("quantile_codes", "v", "pUpuup")

BIN_SHIFT = 18
"""A bin holds the floats that agree but for so many low bits, 1/32 of an octave; as in kernels/quantile/quantile.h."""
SIGN_BINS = 1 << (31 - BIN_SHIFT)
ROUNDS = 64
"""The most rounds of the algorithm; it has mostly settled after ten."""


@operation()
def histogram(values: F32) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """How many values each bin has, and the sum of their significands of 24 bits; on the host.

    The bins of positive values and zeros come first, by magnitude, and then those of negative values. On a GPU, the
    host waits for the device.

    Args:
        values: float32 ``[n]``, finite.
    """
    bins = np.zeros((2, 2 * SIGN_BINS), np.uint64)
    _bins(values, values.size, bins[0], bins[1])
    return bins[0], bins[1]


@histogram.cuda
def _(values: Device) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    xp, n = array_module(values), values.size
    bins = cleared(xp, 4 * SIGN_BINS, u64)
    if n:
        counts, sums = bins[: 2 * SIGN_BINS], bins[2 * SIGN_BINS :]
        for_each(xp, "quantile/quantile", "quantile_bins", n, values, n, counts, sums)
    on_host = bins.get().reshape(2, -1)
    return on_host[0], on_host[1]


@operation()
def codes(values: F32, below: U32, above: U32) -> U32:
    """The bucket of each value: those of negative values first, by magnitude, then the others.

    Args:
        values: float32 ``[n]``, finite.
        below, above: on the host, the least magnitude bits of each bucket of negative and of other values; strictly
            increasing, the first one 0.
    """
    half = 1 << max(int(below.size) - 1, int(above.size) - 1, 0).bit_length()
    table = np.full(2 * half, 2**32 - 1, np.uint32)
    table[: above.size], table[half : half + below.size] = above, below
    found = np.empty(values.size, np.uint32)
    _codes(values, values.size, table, half, below.size, found)
    return found


@codes.cuda
def _(values: Device, below: U32, above: U32) -> Device:
    xp, n = array_module(values), values.size
    found = xp.empty(n, u32)
    if n:
        # An array without elements may have no address.
        of_signs = [xp.asarray(np.append(splits, np.uint32(0))) for splits in (below, above)]
        counts = xp.asarray(np.array([below.size, above.size], u64))
        for_each(xp, "quantile/quantile", "quantile_codes", n, values, n, *of_signs, counts, u32(0), found)
    return found


def splits(counts: NDArray[np.uint64], sums: NDArray[np.uint64], buckets: int) -> tuple[U32, NDArray[np.float64]]:
    """The buckets of one sign: for each the least magnitude bits, the first one 0, and the mean of its magnitudes.

    Lloyd's algorithm begins with equally full buckets. In each round, a bucket takes the bins whose mean is nearest to
    its own mean. A bucket that loses all bins is left out.

    Args:
        counts, sums: ``histogram`` of the sign.
        buckets: the most of them; none without values.
    """
    used = np.flatnonzero(counts)
    if used.size == 0:
        return np.empty(0, np.uint32), np.empty(0, np.float64)
    exponent = np.maximum(used >> (23 - BIN_SHIFT), 1) - 150
    number = counts[used].astype(np.float64).tolist()
    total = np.ldexp(sums[used].astype(np.float64), exponent).tolist()
    center = [one / of for one, of in zip(total, number, strict=True)]
    size, before = sum(number), np.cumsum([0.0, *number[:-1]])
    starts = sorted({int(np.searchsorted(before * buckets, j * size)) for j in range(buckets)} - {used.size})
    for last in range(ROUNDS, -1, -1):
        ends = [*starts[1:], used.size]
        means = [fsum(total[i:j]) / fsum(number[i:j]) for i, j in zip(starts, ends, strict=True)]
        limits = [(low + high) / 2 for low, high in zip(means, means[1:], strict=False)]
        following = sorted({0, *(bisect_right(center, limit) for limit in limits)} - {used.size})
        if following == starts or not last:
            break
        starts = following
    least = (used[starts].astype(np.uint64) << np.uint64(BIN_SHIFT)).astype(np.uint32)
    least[0] = 0
    return least, np.array(means, np.float64)
