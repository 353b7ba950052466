"""16-bit floats by their definition: the nearest of all finite 16-bit values, ties to the even word."""

import struct

import numpy as np


def finite_values(kind: str) -> np.ndarray:
    """The values of the words from 0 to the last finite one, float64: increasing and not negative."""
    if kind == "float16":
        exponent_bits, mantissa_bits = 5, 10
    else:
        exponent_bits, mantissa_bits = 8, 7
    bias = 2 ** (exponent_bits - 1) - 1
    values = []
    for exponent in range(2**exponent_bits - 1):
        for mantissa in range(2**mantissa_bits):
            if exponent:
                values.append((1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias))
            else:
                values.append(mantissa / 2**mantissa_bits * 2.0 ** (1 - bias))
    return np.array(values)


TABLES = {kind: finite_values(kind) for kind in ("float16", "bfloat16")}


def word_of(x: float, kind: str) -> int:
    table = TABLES[kind]
    magnitude = min(abs(x), table[-1])
    above = int(np.searchsorted(table, magnitude))
    candidates = [word for word in (above - 1, above) if 0 <= word < table.size]
    nearest = min(candidates, key=lambda word: (abs(float(table[word]) - magnitude), word % 2))
    return nearest | (0x8000 if np.signbit(x) else 0)


def encode(values: np.ndarray, kind: str) -> bytes:
    head = b"\0\0" if kind == "float16" else b"\1\0"
    return head + b"".join(struct.pack("<H", word_of(float(x), kind)) for x in values)


def decode(section: bytes) -> np.ndarray:
    table = TABLES["bfloat16" if section[0] else "float16"]
    words = struct.unpack(f"<{len(section) // 2 - 1}H", section[2:])
    return np.array([(-1 if word >> 15 else 1) * table[word & 0x7FFF] for word in words], np.float32)
