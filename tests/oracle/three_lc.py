"""3LC (Lim, Andersen, Kaminsky, SysML 2019, section 3), one element at a time, in exact fractions."""

import struct
from fractions import Fraction

import numpy as np

from tests.oracle.qsgd import LARGEST
from tests.oracle.trits import expand, pack, unpack, zero_runs


def encode(dense: np.ndarray, multiplier: float) -> bytes:
    x = dense.astype(np.float32).tolist()
    header = struct.pack("<f", min(multiplier * max(map(abs, x), default=0.0), LARGEST))
    m = Fraction(struct.unpack("<f", header)[0])
    digits = []
    for v in x:
        kept = v != 0 and Fraction(abs(v)) / m >= Fraction(1, 2)
        digits.append(1 if not kept else 0 if v < 0 else 2)
    return header + zero_runs(pack(digits))


def decode(section: bytes, numel: int) -> np.ndarray:
    (m,) = struct.unpack_from("<f", section)
    return np.array([m * (digit - 1) for digit in unpack(expand(section[4:]), numel)], np.float32)
