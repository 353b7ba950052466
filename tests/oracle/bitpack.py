"""Bit strings as Python lists, and fields of fixed width."""


def to_bytes(bits: list[int]) -> bytes:
    """Bit b of the string is bit b % 8 of byte b // 8; zeros fill the last byte."""
    bits = bits + [0] * (-len(bits) % 8)
    return bytes(sum(bits[at + j] << j for j in range(8)) for at in range(0, len(bits), 8))


def to_bits(data: bytes) -> list[int]:
    return [byte >> j & 1 for byte in data for j in range(8)]


def field(value: int, width: int) -> list[int]:
    """The bits of a field, the low bit first."""
    return [value >> j & 1 for j in range(width)]


def table_of(entries: dict[int, list[int]]) -> bytes:
    """The bits of each symbol's entry, up to the last; the nibbles 0 and n - 1 for n <= 16 symbols without one."""
    bits: list[int] = []
    symbol = 0
    while symbol <= max(entries):
        if symbol in entries:
            bits += entries[symbol]
            symbol += 1
        else:
            run = 1
            while run < 16 and symbol + run not in entries:
                run += 1
            bits += field(0, 4) + field(run - 1, 4)
            symbol += run
    return to_bytes(bits)


def pack(values: list[int], width: int) -> bytes:
    return to_bytes([bit for value in values for bit in field(value, width)])


def unpack(data: bytes, count: int, width: int) -> list[int]:
    bits = to_bits(data)
    return [sum(bits[i * width + j] << j for j in range(width)) for i in range(count)]


def width_of(numel: int) -> int:
    """ceil(log2 numel), by counting: the least width whose fields have ``numel`` different values."""
    width = 0
    while 2**width < numel:
        width += 1
    return width
