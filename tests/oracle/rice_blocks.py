"""Rice with a parameter for each block of 64 gaps, as docs/container.md draws it."""

from tests.oracle.bitpack import pack, to_bytes, unpack
from tests.oracle.rice import gaps

BLOCK = 64


def blocks(numbers):
    return [numbers[at : at + BLOCK] for at in range(0, len(numbers), BLOCK)]


def bits(block, b):
    """Of one block, without what fills a byte."""
    return sum(b + (gap >> b) + 1 for gap in block)


def parameters(section, count):
    """Those of a section."""
    return unpack(section, -(-count // BLOCK), 5)


def encode(indices, chosen):
    """The section, for a parameter of each block."""
    of_blocks = blocks(gaps(indices))
    lows = b"".join(pack([gap % 2**b for gap in block], b) for block, b in zip(of_blocks, chosen, strict=True))
    highs = []
    for block, b in zip(of_blocks, chosen, strict=True):
        for gap in block:
            highs += [0] * (gap >> b) + [1]
    return pack(chosen, 5) + lows + to_bytes(highs)
