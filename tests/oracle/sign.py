"""Signs with their mean magnitude (EF-SignSGD, Karimireddy et al., ICML 2019, algorithm 1), one value at a time."""

import struct

import numpy as np

from tests.oracle.bitpack import pack, unpack
from tests.oracle.bucket_sum import bucket_sum


def encode(values: np.ndarray, bucket: int | None) -> bytes:
    values = values.astype(np.float32)
    bucket = bucket or max(1, values.size)
    scales = b""
    for at in range(0, values.size, bucket):
        x = values[at : at + bucket].tolist()
        scales += struct.pack("<f", bucket_sum([abs(v) for v in x]) / len(x))
    return struct.pack("<II", 0, bucket) + scales + pack([int(v < 0) for v in values], 1)


def decode(section: bytes, count: int) -> np.ndarray:
    _, bucket = struct.unpack_from("<II", section)
    buckets = -(-count // bucket)
    scales = struct.unpack_from(f"<{buckets}f", section, 8)
    signs = unpack(section[8 + 4 * buckets :], count, 1)
    return np.array([scales[i // bucket] * (-1 if signs[i] else 1) for i in range(count)], np.float32)
