"""Golomb-Rice: gap >> b in unary (zeros, then a one), and the low b bits as a field. Lows and highs are separate."""

from tests.oracle.bitpack import pack, to_bytes


def gaps(indices: list[int]) -> list[int]:
    return [index - previous - 1 for previous, index in zip([-1, *indices], indices, strict=False)]


def bits(indices: list[int], b: int) -> int:
    """The number of bits of the code with the parameter b."""
    return sum((gap >> b) + 1 + b for gap in gaps(indices))


def of_gaps(numbers: list[int], b: int) -> bytes:
    """The section of any numbers."""
    highs: list[int] = []
    for number in numbers:
        highs += [0] * (number >> b) + [1]
    return bytes([b]) + pack([number % 2**b for number in numbers], b) + to_bytes(highs)


def encode(indices: list[int], b: int) -> bytes:
    return of_gaps(gaps(indices), b) if indices else b""
