"""Natural compression (Horvath et al., arXiv:1905.10988, section 2), one value at a time, in exact fractions."""

import math
from fractions import Fraction

import numpy as np

from tests.oracle.bitpack import pack, unpack
from tests.oracle.philox import philox4x32
from tests.oracle.qsgd import STREAM_ROUNDING


def rounded(magnitude: float, random: Fraction) -> int:
    """The float32 exponent field of the rounded magnitude. ``random`` is in [0, 1)."""
    if magnitude < 2.0**-126:  # between 0 and the least normal number
        return int(Fraction(magnitude) / Fraction(2.0**-126) + random >= 1)
    exponent = math.frexp(magnitude)[1] - 1
    up = Fraction(magnitude) / Fraction(2) ** exponent - 1 + random >= 1
    return min(exponent + 127 + up, 254)


def encode(values: np.ndarray, key: tuple[int, int, int, int]) -> bytes:
    seed, parameter, step, rank = key
    values = values.astype(np.float32)
    exponents = []
    for i, x in enumerate(values.tolist()):
        word = philox4x32((seed, parameter), (i // 4, step, STREAM_ROUNDING, rank))[i % 4]
        exponents.append(rounded(abs(x), Fraction(word // 2**9, 2**23)))
    return pack([int(v < 0) for v in values], 1) + bytes(exponents)


def decode(section: bytes, count: int) -> np.ndarray:
    at = (count + 7) // 8
    signs = unpack(section[:at], count, 1)
    magnitudes = [2.0 ** (e - 127) if e else 0.0 for e in section[at:]]
    return np.array([-m if sign else m for sign, m in zip(signs, magnitudes, strict=True)], np.float32)
