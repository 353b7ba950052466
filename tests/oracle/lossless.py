"""Floats without loss, in chunks of 4096 values: exponents in two codes of equal lengths, and the rest as it is."""

import struct

import numpy as np

from tests.oracle.bitpack import pack, unpack

CHUNK = 4096


def taken(data: bytes, count: int, width: int) -> tuple[list[int], bytes]:
    """The fields at the begin of ``data``, and the bytes after them."""
    size = (count * width + 7) // 8
    return unpack(data[:size], count, width), data[size:]


def words(values: np.ndarray) -> list[int]:
    return [struct.unpack("<I", struct.pack("<f", x))[0] for x in values.tolist()]


def ranking(exponents: list[int]) -> list[int]:
    """All exponents, those that occur most often in the sample first."""
    sample = [exponent for i, exponent in enumerate(exponents) if i % 64 < 16]
    return sorted(range(256), key=lambda exponent: (-sample.count(exponent), exponent))


def best_bits(exponents: list[int], ranked: list[int]) -> tuple[int, int]:
    """The bits of both codes under which a value of the sample, and the symbols, take the least."""
    sample = [ranked.index(exponent) for i, exponent in enumerate(exponents) if i % 64 < 16]
    costs = {}
    for a in range(4):
        for b in range(4):
            first, both = 2**a - 1, 2**a + 2**b - 2
            bits = a * len(sample) + b * sum(r >= first for r in sample) + 8 * sum(r >= both for r in sample)
            costs[a, b] = bits * len(exponents) + 8 * both * len(sample)
    return min(costs, key=lambda ab: (costs[ab], ab))


def encode_chunk(patterns: list[int]) -> bytes:
    exponents = [pattern >> 23 & 255 for pattern in patterns]
    fractions = [pattern & (2**23 - 1) for pattern in patterns]
    unused = 0
    while unused < 23 and all(fraction >> unused & 1 == 0 for fraction in fractions):
        unused += 1
    m = 24 - unused
    ranked = ranking(exponents)
    a, b = best_bits(exponents, ranked)
    first, second = ranked[: 2**a - 1], ranked[2**a - 1 : 2**a + 2**b - 2]
    both = zip(patterns, fractions, strict=True)
    fields = [(pattern >> 31) << (m - 1) | fraction >> unused for pattern, fraction in both]
    out = bytes([m, a + 4 * b, *first, *second]) + pack([field % 2 ** (m % 8) for field in fields], m % 8)
    for plane in range(m // 8):
        out += bytes(field >> (m % 8 + 8 * plane) & 255 for field in fields)
    left = exponents
    for code, width in ((first, a), (second, b)):
        out += pack([code.index(one) if one in code else 2**width - 1 for one in left], width)
        left = [one for one in left if one not in code]
    return out + bytes(left)


def encode(values: np.ndarray) -> bytes:
    if values.dtype == np.float32:
        chunks = [encode_chunk(words(values[i : i + CHUNK])) for i in range(0, values.size, CHUNK)]
        coded = b"".join(struct.pack("<H", len(chunk)) for chunk in chunks) + b"".join(chunks)
        if len(coded) <= values.nbytes:
            return b"\1" + coded
    return b"\0" + values.tobytes()


def decode_chunk(data: bytes, count: int) -> list[int]:
    m, a, b = data[0], data[1] % 4, data[1] // 4
    first, second = list(data[2 : 2 + 2**a - 1]), list(data[2 + 2**a - 1 : 2 + 2**a + 2**b - 2])
    fields, rest = taken(data[2 + 2**a + 2**b - 2 :], count, m % 8)
    for plane in range(m // 8):
        fields = [field | rest[plane * count + i] << (m % 8 + 8 * plane) for i, field in enumerate(fields)]
    codes, rest = taken(rest[m // 8 * count :], count, a)
    second_codes, rest = taken(rest, codes.count(2**a - 1), b)
    others = iter(rest)
    escapes = iter([next(others) if code == 2**b - 1 else second[code] for code in second_codes])
    exponents = [next(escapes) if code == 2**a - 1 else first[code] for code in codes]
    assert not list(others)
    return [
        field >> (m - 1) << 31 | exponent << 23 | field % 2 ** (m - 1) << (24 - m)
        for field, exponent in zip(fields, exponents, strict=True)
    ]


def decode(section: bytes, count: int, dtype: np.dtype) -> np.ndarray:
    if section[0] == 0:
        return np.frombuffer(section[1:], dtype)
    chunks = -(-count // CHUNK)
    sizes = struct.unpack(f"<{chunks}H", section[1 : 1 + 2 * chunks])
    at, patterns = 1 + 2 * chunks, []
    for i, size in enumerate(sizes):
        patterns += decode_chunk(section[at : at + size], min(CHUNK, count - i * CHUNK))
        at += size
    assert at == len(section)
    return np.array(patterns, np.uint32).view(np.float32)
