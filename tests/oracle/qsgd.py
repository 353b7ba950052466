"""QSGD (Alistarh et al., NeurIPS 2017, section 3.1), one value at a time, with the layout of docs/container.md.

All operations are float32, in the order of docs/container.md: |x| / norm, times s, plus u, integer part.
"""

import math
import struct

import numpy as np

from tests.oracle.bitpack import pack, unpack
from tests.oracle.bucket_sum import in_lanes
from tests.oracle.philox import philox4x32, uniform24
from tests.oracle.qsparse import beta_qsgd, divided

STREAM_ROUNDING = 3
LARGEST = float(np.finfo(np.float32).max)


def norm_of(bucket: list[float], l2: bool) -> np.float32:
    if not l2:
        return np.float32(max(map(abs, bucket)))
    return np.float32(min(math.sqrt(in_lanes([x * x for x in bucket], 8)), LARGEST))


def uniform(i: int, seed: int, parameter: int, step: int, rank: int) -> np.float32:
    return np.float32(uniform24(philox4x32((seed, parameter), (i // 4, step, STREAM_ROUNDING, rank))[i % 4]))


def encode(
    values: np.ndarray, bits: int, bucket: int, l2: bool, key: tuple[int, int, int, int], scaled: bool = False
) -> bytes:
    s = 2 ** (bits - 1) - 1
    values = values.astype(np.float32)
    norms = [norm_of(values[at : at + bucket].tolist(), l2) for at in range(0, values.size, bucket)]
    codes = []
    for i, x in enumerate(values):
        norm = norms[i // bucket]
        ratio = abs(x) / norm if norm > 0 else np.float32(0)
        level = min(int(ratio * np.float32(s) + uniform(i, *key)), s)
        codes.append(s - level if x < 0 else s + level)
    if scaled:
        sizes = [min(bucket, values.size - at) for at in range(0, values.size, bucket)]
        norms = [divided(norm, beta_qsgd(size, s, l2)) for norm, size in zip(norms, sizes, strict=True)]
    return struct.pack("<BxxxI", bits, bucket) + b"".join(struct.pack("<f", n) for n in norms) + pack(codes, bits)


def decode(section: bytes, count: int) -> np.ndarray:
    bits, bucket = struct.unpack_from("<BxxxI", section)
    s = np.float32(2 ** (bits - 1) - 1)
    buckets = -(-count // bucket)
    norms = struct.unpack_from(f"<{buckets}f", section, 8)
    codes = unpack(section[8 + 4 * buckets :], count, bits)
    return np.array([(np.float32(c) - s) / s * np.float32(norms[i // bucket]) for i, c in enumerate(codes)], np.float32)
