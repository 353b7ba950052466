"""Golomb-Rice: gap >> b in unary (zeros, then a one), and the low b bits as a field. Lows and highs are separate."""

from tests.oracle.bitpack import field, pack, to_bits, to_bytes, unpack


def gaps(indices: list[int]) -> list[int]:
    return [index - previous - 1 for previous, index in zip([-1, *indices], indices, strict=False)]


def bits(indices: list[int], b: int) -> int:
    """The number of bits of the code with the parameter b."""
    return sum((gap >> b) + 1 + b for gap in gaps(indices))


def encode(indices: list[int], b: int) -> bytes:
    if not indices:
        return b""
    lows = pack([gap % 2**b for gap in gaps(indices)], b)
    highs: list[int] = []
    for gap in gaps(indices):
        highs += [0] * (gap >> b) + field(1, 1)
    return bytes([b]) + lows + to_bytes(highs)


def decode(section: bytes, count: int) -> list[int]:
    b = section[0]
    at = 1 + -(-count * b // 8)
    lows = unpack(section[1:at], count, b)
    indices, previous, high = [], -1, 0
    for bit in to_bits(section[at:]):
        if len(indices) == count:
            break
        if bit:
            previous += 1 + (high << b) + lows[len(indices)]
            indices.append(previous)
            high = 0
        else:
            high += 1
    return indices
