"""Rice with a parameter for each block of 64 gaps, as docs/container.md draws it; bits as strings, low bit first."""

from tests.oracle.rice import gaps

BLOCK = 64


def fields(numbers, width):
    return "".join(format(number, f"0{width}b")[::-1] if width else "" for number in numbers)


def whole(bits):
    return bits + "0" * (-len(bits) % 8)


def to_bytes(bits):
    bits = whole(bits)
    return bytes(int(bits[at : at + 8][::-1], 2) for at in range(0, len(bits), 8))


def blocks(numbers):
    return [numbers[at : at + BLOCK] for at in range(0, len(numbers), BLOCK)]


def bits(block, b):
    """Of one block, without what fills a byte."""
    return sum(b + (gap >> b) + 1 for gap in block)


def parameters(section, count):
    """Those of a section."""
    string = "".join(format(byte, "08b")[::-1] for byte in section)
    return [int(string[5 * j : 5 * j + 5][::-1], 2) for j in range(-(-count // BLOCK))]


def encode(indices, chosen):
    """The section, for a parameter of each block."""
    of_blocks = blocks(gaps(indices))
    lows = "".join(whole(fields([gap % 2**b for gap in block], b)) for block, b in zip(of_blocks, chosen, strict=True))
    highs = "".join("0" * (gap >> b) + "1" for block, b in zip(of_blocks, chosen, strict=True) for gap in block)
    return to_bytes(whole(fields(chosen, 5)) + lows + highs)


def decode(section, count):
    string = "".join(format(byte, "08b")[::-1] for byte in section)
    chosen = parameters(section, count)
    sizes = [len(block) for block in blocks([0] * count)]
    at = len(whole("0" * 5 * len(chosen)))
    lows = []
    for b, size in zip(chosen, sizes, strict=True):
        lows += [int(string[at + i * b : at + i * b + b][::-1] or "0", 2) for i in range(size)]
        at += len(whole("0" * b * size))
    found, index = [], -1
    for number in range(count):
        one = string.index("1", at)
        index += (one - at) * 2 ** chosen[number // BLOCK] + lows[number] + 1
        at = one + 1
        found.append(index)
    return found
