"""Elias-Fano: the low l bits of each index, and the high bits as the ones of a bit string."""

from tests.oracle.bitpack import pack, to_bytes


def low_bits(count: int, numel: int) -> int:
    return min(range(32), key=lambda low: count * low + ((numel - 1) >> low))


def encode(indices: list[int], numel: int) -> bytes:
    if not indices:
        return b""
    low = low_bits(len(indices), numel)
    highs = [0] * ((indices[-1] >> low) + len(indices))
    for i, index in enumerate(indices):
        highs[(index >> low) + i] = 1
    return pack([index % 2**low for index in indices], low) + to_bytes(highs)
