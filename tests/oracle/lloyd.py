"""Splits of least squared error by Lloyd's algorithm, on bins of 1/32 of an octave, as hvd_deepreduce/ops/lloyd.py
describes it; one value at a time."""

import math
import struct
from fractions import Fraction

from tests.oracle import bitpack


def bin_of(magnitude):
    (bits,) = struct.unpack("<I", struct.pack("<f", magnitude))
    return bits >> 18


def mean(members):
    return float(sum(map(Fraction, members))) / len(members)


def buckets_of(magnitudes, most):
    """The magnitudes of one sign in buckets, each a list of bins, each a list of values."""
    if not magnitudes or most == 0:
        return []
    bins = {}
    for magnitude in sorted(magnitudes):
        bins.setdefault(bin_of(magnitude), []).append(magnitude)
    bins = list(bins.values())
    # Bucket j begins with the first bin before which there are at least j / most of the values.
    before = [sum(map(len, bins[:i])) for i in range(len(bins))]
    firsts = [[i for i, n in enumerate(before) if n * most >= j * len(magnitudes)] for j in range(most)]
    starts = sorted({found[0] for found in firsts if found})
    for last in range(64, -1, -1):
        ends = [*starts[1:], len(bins)]
        means = [mean(sum(bins[i:j], [])) for i, j in zip(starts, ends, strict=True)]
        limits = [(low + high) / 2 for low, high in zip(means, means[1:], strict=False)]
        following = {0, *(sum(1 for one in bins if mean(one) <= limit) for limit in limits)} - {len(bins)}
        if sorted(following) == starts or not last:
            break
        starts = sorted(following)
    return [bins[i:j] for i, j in zip(starts, [*starts[1:], len(bins)], strict=True)]


def quantize(values, buckets):
    """(means, bucket of each value)."""
    values = [float(v) for v in values]
    below, above = [-v for v in values if v < 0], [v + 0.0 for v in values if v >= 0]
    shared = min(buckets, len(values))
    for_below = 0
    if below:
        for_below = math.floor(Fraction(shared * len(below), len(values)) + Fraction(1, 2))
        for_below = max(1, min(for_below, shared - bool(above)))
    low, high = buckets_of(below, for_below), buckets_of([abs(v) for v in above], shared - for_below)
    means = [-mean(sum(bins, [])) for bins in low] + [mean(sum(bins, [])) for bins in high]

    def place(sign, magnitude):
        return max((j for j, bins in enumerate(sign) if bin_of(bins[0][0]) <= bin_of(magnitude)), default=0)

    return means, [place(low, -v) if v < 0 else len(low) + place(high, abs(v)) for v in values]


def encode(values, buckets):
    if len(values) == 0:
        return b""
    means, codes = quantize(values, buckets)
    packed = bitpack.pack(codes, (len(means) - 1).bit_length())
    return struct.pack(f"<I{len(means)}f", len(means), *means) + packed
