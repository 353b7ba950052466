"""Philox4x32-10 in plain integers, from Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3",
SC 2011, section 3.3; and the permutation of docs/container.md with which random-k selects."""

WORD = 2**32


def philox4x32(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, WORD)
        high1, low1 = divmod(0xCD9E8D57 * c2, WORD)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = (k0 + 0x9E3779B9) % WORD
        k1 = (k1 + 0xBB67AE85) % WORD
    return c0, c1, c2, c3


def uniform24(word: int) -> float:
    """The upper 24 bits, as a fraction in [0, 1)."""
    return (word // 2**8) / 2**24


def fmix32(h: int) -> int:
    """MurmurHash3's 32-bit finalizer."""
    h ^= h >> 16
    h = h * 0x85EBCA6B % WORD
    h ^= h >> 13
    h = h * 0xC2B2AE35 % WORD
    return h ^ (h >> 16)


def permute(value: int, domain: int, k0: int, k1: int, k2: int) -> int:
    """The image of ``value`` under the keyed bijection of 0 .. domain - 1."""
    width = max(1, ((domain - 1).bit_length() + 1) // 2)
    while True:
        left, right = value >> width, value % 2**width
        for turn in range(6):
            mixed = right ^ fmix32((k0 + turn * 0x9E3779B9) % WORD) ^ fmix32(k1 ^ (turn << 28) % WORD) ^ k2
            left, right = right, left ^ (fmix32(mixed) % 2**width)
        value = (left << width) | right
        if value < domain:
            return value
