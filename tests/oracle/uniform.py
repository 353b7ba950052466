"""Uniform levels with stochastic rounding (ZipML, Zhang et al., ICML 2017, section 2), one value at a time, float64."""

import math
import struct

import numpy as np

from tests.oracle.qsgd import uniform


def encode(values: np.ndarray, bits: int, bucket: int, key: tuple[int, int, int, int]) -> bytes:
    s = 2**bits - 1
    values = values.astype(np.float32)
    ranges, codes = b"", b""
    for at in range(0, values.size, bucket):
        x = values[at : at + bucket].tolist()
        low, high = min(x) + 0.0, max(x) + 0.0
        ranges += struct.pack("<ff", low, high)
        scale = s / (high - low) if high > low else 0.0
        for i, v in enumerate(x, at):
            level = min(math.floor((v - low) * scale + float(uniform(i, *key))), s)
            codes += level.to_bytes(bits // 8, "little")
    return struct.pack("<II", bits, bucket) + ranges + codes


def decode(section: bytes, count: int) -> np.ndarray:
    bits, bucket = struct.unpack_from("<II", section)
    buckets = -(-count // bucket)
    ends = struct.unpack_from(f"<{2 * buckets}f", section, 8)
    codes = struct.unpack_from(f"<{count}{'B' if bits == 8 else 'H'}", section, 8 + 8 * buckets)
    out = []
    for i, code in enumerate(codes):
        low, high = ends[2 * (i // bucket)], ends[2 * (i // bucket) + 1]
        out.append(low + code * ((high - low) / (2**bits - 1)))
    return np.array(out, np.float64).astype(np.float32)
