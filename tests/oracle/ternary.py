"""TernGrad (Wen et al., NeurIPS 2017, sections 3.1 and 3.3), one value at a time."""

import math
import struct

import numpy as np

from tests.oracle.bucket_sum import bucket_sum
from tests.oracle.qsgd import LARGEST, uniform
from tests.oracle.qsparse import beta_qsgd, divided
from tests.oracle.trits import pack, unpack


def encode(
    values: np.ndarray, bucket: int, clip: float | None, key: tuple[int, int, int, int], scaled: bool = False
) -> bytes:
    values = values.astype(np.float32)
    scales, digits = [], []
    for at in range(0, values.size, bucket):
        x = values[at : at + bucket].tolist()
        scale = max(map(abs, x))
        if clip is not None:
            deviation = math.sqrt(bucket_sum([v * v for v in x]) / len(x))
            scale = min(scale, float(np.float32(min(clip * deviation, LARGEST))))
        scales.append(divided(scale, beta_qsgd(len(x), 1, False)) if scaled else scale)
        for i, v in enumerate(x, at):
            v = np.float32(min(max(v, -scale), scale))
            ratio = abs(v) / np.float32(scale) if scale > 0 else np.float32(0)
            taken = ratio + uniform(i, *key) >= 1
            digits.append(1 if not taken else 0 if v < 0 else 2)
    return struct.pack("<II", 0, bucket) + b"".join(struct.pack("<f", s) for s in scales) + pack(digits)


def decode(section: bytes, count: int) -> np.ndarray:
    _, bucket = struct.unpack_from("<II", section)
    buckets = -(-count // bucket)
    scales = struct.unpack_from(f"<{buckets}f", section, 8)
    digits = unpack(section[8 + 4 * buckets :], count)
    return np.array([(digit - 1) * scales[i // bucket] for i, digit in enumerate(digits)], np.float32)
