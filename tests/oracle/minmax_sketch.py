"""The sections of SketchML and SKCompress, from SKCompress, sections 4.2 and 5.1, and codecs/joint/minmax_sketch.py."""

import math
import struct
from collections.abc import Callable
from fractions import Fraction

import numpy as np

from tests.oracle import bitpack, quantile
from tests.oracle.philox import fmix32, philox4x32

STREAM_SKETCH = 5
Key = tuple[int, int, int]


def column(index: int, row: int, columns: int, key: Key) -> int:
    """The column of the bin of a key in a row."""
    seed, parameter, step = key
    word = philox4x32((seed, parameter), (row, step & 0xFFFFFFFF, STREAM_SKETCH, 0))[0]
    return fmix32(index ^ word) * columns >> 32


def insert(indices: list[int], numbers: list[int], rows: int, columns: int, width: int, key: Key) -> list[list[int]]:
    """The bins after all insertions: a bin keeps the smallest number."""
    bins = [[width - 1] * columns for _ in range(rows)]
    for index, number in zip(indices, numbers, strict=True):
        for row in range(rows):
            at = column(index, row, columns, key)
            bins[row][at] = min(bins[row][at], number)
    return bins


def query(index: int, bins: list[list[int]], key: Key) -> int:
    """The number of a key: the largest of its bins."""
    return max(of_row[column(index, row, len(of_row), key)] for row, of_row in enumerate(bins))


def flagged(indices: list[int]) -> bytes:
    """Section 5.1: each gap in as few bytes as possible, and 2 bits for this number of bytes."""
    lengths, gaps = [], b""
    previous = -1
    for index in indices:
        gap = index - previous - 1
        length = max(1, (gap.bit_length() + 7) // 8)
        lengths.append(length - 1)
        gaps += gap.to_bytes(length, "little")
        previous = index
    return bitpack.pack(lengths, 2) + gaps


def packed(bins: list[int], width: int) -> bytes:
    """The bins in the format of SketchML."""
    return bitpack.pack(bins, (width - 1).bit_length())


def encode(
    indices: list[int],
    values: np.ndarray,
    numel: int,
    key: Key,
    *,
    buckets: int,
    groups: int,
    rows: int,
    columns: float,
    center: str,
    encode_keys: Callable[[list[int], int], bytes] = lambda keys, numel: flagged(keys),
    encode_bins: Callable[[list[int], int], bytes] = packed,
    dense: bool = False,
) -> tuple[bytes, list[float]]:
    """The section, and the values to which it decodes. A dense tensor has the number of each element's group in place
    of keys."""
    if len(values) == 0:
        return b"", []
    means, codes, negative = quantile.quantize(values, buckets, center)
    scaled = round(columns * 65536)
    members: list[list[int]] = []  # the buckets of each group
    of_sign = []
    for low, high in ((0, negative), (negative, len(means))):
        share = Fraction(min(groups, len(means)) * (high - low), len(means))
        own = max(math.floor(share + Fraction(1, 2)), math.ceil((high - low) / 256))
        of_sign.append(own)
        if own == 0:
            continue
        cuts = [low + j * (high - low) // own for j in range(own)]
        members += [list(range(begin, end)) for begin, end in zip(cuts, [*cuts[1:], high], strict=True)]
    table, parts = b"", b""
    decoded = [0.0] * len(indices)
    for of_group in members:
        mine = [i for i, code in enumerate(codes) if code in of_group]
        keys, numbers = [int(indices[i]) for i in mine], [codes[i] - of_group[0] for i in mine]
        if not mine:
            table += bytes(12)
            continue
        bins = insert(keys, numbers, rows, max(1, len(mine) * scaled // 65536), len(of_group), key)
        for i, index in zip(mine, keys, strict=True):
            decoded[i] = means[of_group[query(index, bins, key)]]
        key_part = b"" if dense else encode_keys(keys, numel)
        bin_part = encode_bins([number for row in bins for number in row], len(of_group))
        table += struct.pack("<III", len(mine), len(key_part), len(bin_part))
        parts += key_part + bin_part
    if dense:
        groups_of = [next(j for j, of_group in enumerate(members) if code in of_group) for code in codes]
        fields = bitpack.pack(groups_of, (len(members) - 1).bit_length())
        in_bytes = encode_bins is not packed and 2 <= len(members) <= 256
        parts = (encode_bins(groups_of, len(members)) if in_bytes else fields) + parts
    header = struct.pack("<BBxxIIIHH", rows, dense, scaled, len(means), negative, *of_sign)
    return header + struct.pack(f"<{len(means)}f", *means) + table + parts, decoded
