"""Quantile buckets, from SKCompress, section 4.1, with the rules for ties and signs of codecs/value/quantile.py."""

import math
import struct
from fractions import Fraction

import numpy as np

from tests.oracle import bitpack


def next_float(x):
    return float(np.nextafter(np.float32(x), np.float32(np.inf)))


def splits_of(magnitudes, buckets):
    """The lower ends of the buckets. A repeated split is replaced by the next float, once."""
    ordered = sorted(magnitudes)
    ranks = [ordered[j * len(ordered) // buckets] for j in range(buckets)]
    splits = []
    for split in ranks:
        if not splits or split > splits[-1]:
            splits.append(split)
        elif split == splits[-1] and ranks.count(split) > 1 and split < ordered[-1]:
            splits.append(next_float(split))
    return splits


def center_of(members, low, high, center):
    if not members or high in (low, next_float(low)):
        return low
    if center == "middle":
        return float(np.float32((low + high) / 2))
    exponent = max(math.frexp(max(members))[1] - 1, -126)
    unit = Fraction(2) ** (exponent - 30)
    total = sum(math.floor(Fraction(member) / unit) for member in members)
    mean = np.float32(float(total) / float(len(members)) * float(unit))
    return min(max(float(mean), min(members)), max(members))


def side(magnitudes, buckets, center):
    """The splits and the centers of the buckets of one sign."""
    if not magnitudes:
        return [], []
    splits = splits_of(magnitudes, buckets)
    ends = [*splits[1:], max(magnitudes)]
    centers = []
    for j, (low, high) in enumerate(zip(splits, ends, strict=True)):
        last = j == len(splits) - 1
        members = [m for m in magnitudes if low <= m and (last or m < high)]
        centers.append(center_of(members, low, high, center))
    return splits, centers


def quantize(values, buckets, center):
    """(means, bucket of each value, number of negative buckets)."""
    values = [float(v) for v in values]
    below, above = [-v for v in values if v < 0], [v for v in values if v > 0]
    zero = len(below) + len(above) < len(values)
    if zero and buckets == 2 and below and above:
        zero, above = False, [v for v in values if v >= 0]
    others = len(below) + len(above)
    shared = min(buckets - zero, others)
    for_below = 0
    if below:
        for_below = math.floor(Fraction(shared * len(below), others) + Fraction(1, 2))
        for_below = max(1, min(for_below, shared - bool(above)))
    low_splits, low_means = side(below, for_below, center)
    high_splits, high_means = side(above, shared - for_below, center)
    if zero:
        high_splits, high_means = [0.0, *high_splits], [0.0, *high_means]
    codes = []
    for v in values:
        if v < 0:
            codes.append(max(j for j, split in enumerate(low_splits) if split <= -v))
        else:
            codes.append(len(low_splits) + max(j for j, split in enumerate(high_splits) if split <= v))
    return [-m for m in low_means] + high_means, codes, len(low_splits)


def word_of(x):
    """An integer that has the order of the floats."""
    (bits,) = struct.unpack("<I", struct.pack("<f", x or 0.0))
    return 2**31 - 1 - (bits - 2**31) if bits >= 2**31 else bits + 2**31


def float_of(word):
    bits = word - 2**31 if word >= 2**31 else 2**32 - 1 - word
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def quantize_both_signs(values, buckets, center):
    """(means, bucket of each value), with buckets from the least value to the largest."""
    words = sorted(word_of(float(v)) for v in values)
    buckets = min(buckets, len(words))
    ranks = [words[j * len(words) // buckets] for j in range(buckets)]
    splits = set(ranks) | {word + 1 for word in ranks if ranks.count(word) > 1 and word < words[-1]}
    splits = sorted(splits)
    means = []
    for j, (low, high) in enumerate(zip(splits, [*splits[1:], words[-1]], strict=True)):
        members = [float_of(w) for w in words if low <= w and (j == len(splits) - 1 or w < high)]
        if not members or high - low <= 1:
            means.append(float_of(low))
        elif center == "middle":
            means.append(float(np.float32((float_of(low) + float_of(high)) / 2)))
        else:
            exponent = max(math.frexp(max(map(abs, members)))[1] - 1, -126)
            unit = Fraction(2) ** (exponent - 30)
            total = sum(math.trunc(Fraction(member) / unit) for member in members)
            mean = float(np.float32(float(total) / float(len(members)) * float(unit)))
            means.append(min(max(mean, min(members)), max(members)))
    return means, [max(j for j, split in enumerate(splits) if split <= word_of(float(v))) for v in values]


def encode(values, buckets, center, separate_signs=True, entropy=0, coder=None):
    """``coder``: of the numbers, as a function of a list; used if it takes fewer bytes."""
    if len(values) == 0:
        return b""
    if separate_signs:
        means, codes, _ = quantize(values, buckets, center)
    else:
        means, codes = quantize_both_signs(values, buckets, center)
    packed = bitpack.pack(codes, (len(means) - 1).bit_length())
    if coder and len(coder(codes)) < len(packed):
        return struct.pack(f"<I{len(means)}f", len(means) + 2**24 * entropy, *means) + coder(codes)
    return struct.pack(f"<I{len(means)}f", len(means), *means) + packed


def decode(section, count):
    """The values of a section whose numbers no coder has made shorter."""
    if not section:
        return np.empty(0, np.float32)
    (buckets,) = struct.unpack_from("<I", section)
    means = np.frombuffer(section[4 : 4 + 4 * buckets], "<f4")
    return means[bitpack.unpack(section[4 + 4 * buckets :], count, (buckets - 1).bit_length())]
