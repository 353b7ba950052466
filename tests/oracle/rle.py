"""Bit-level run lengths (DeepReduce, section 2), computed from the bitmap."""

from itertools import groupby

from tests.oracle.bitpack import field, to_bytes, width_of


def fields(lengths: list[int], width: int, escape: int) -> list[list[int]]:
    full = 2**width - 1
    return [field(v, width) if v < full else field(full, width) + field(v, escape) for v in lengths]


def best(lengths: list[int], escape: int) -> int:
    return min(range(1, 33), key=lambda width: sum(width + escape * (v >= 2**width - 1) for v in lengths))


def encode(indices: list[int], numel: int) -> bytes:
    if not indices:
        return b""
    kept = set(indices)
    bitmap = [i in kept for i in range(indices[-1] + 1)]
    runs = [(bit, len(list(run))) for bit, run in groupby(bitmap)]
    zeros = [length - 1 for bit, length in runs if not bit]
    ones = [length - 1 for bit, length in runs if bit]
    # The first run of zeros may be empty, so its length is written without subtracting 1.
    if bitmap[0]:
        zeros.insert(0, 0)
    else:
        zeros[0] += 1
    escape = width_of(numel)
    z, o = best(zeros, escape), best(ones, escape)
    bits: list[int] = []
    for zero, one in zip(fields(zeros, z, escape), fields(ones, o, escape), strict=True):
        bits += zero + one
    return bytes([z, o]) + to_bytes(bits)
