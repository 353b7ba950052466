"""Uniform levels with stochastic rounding, one value at a time, float64: ZipML, Zhang et al., ICML 2017, section 2; the
rotation and the number of levels are those of Suresh et al., ICML 2017, sections 2 and 3."""

import math
import struct

import numpy as np

from tests.oracle.bitpack import pack, unpack
from tests.oracle.philox import philox4x32
from tests.oracle.qsgd import LARGEST, uniform
from tests.oracle.qsparse import beta_rotated, beta_uniform, divided

STREAM_ROTATION = 6
Key = tuple[int, int, int, int]


def places_of(count: int) -> int:
    """The next power of two."""
    return 2 ** max(0, math.ceil(math.log2(count)))


def minus(i: int, key: Key) -> bool:
    seed, parameter, step = key[:3]
    words = philox4x32((seed, parameter), (i // 128, step, STREAM_ROTATION, 0))
    return bool(words[i // 32 % 4] >> i % 32 & 1)


def hadamard(x: list[float]) -> list[float]:
    """H x, in the order of additions of the fast transform."""
    places = len(x)
    for level in range(places.bit_length() - 1):
        half = 2**level
        x = [x[i - half] - x[i] if i & half else x[i] + x[i + half] for i in range(places)]
    return x


def narrow(x: float) -> float:
    return float(np.float32(min(max(x, -LARGEST), LARGEST)))


def rotate(values: list[float], bucket: int, key: Key) -> list[float]:
    out = []
    for at in range(0, len(values), bucket):
        signed = [-x if minus(i, key) else x for i, x in enumerate(values[at : at + bucket], at)]
        places = places_of(len(signed))
        scale = 1 / math.sqrt(places)
        out += [narrow(z * scale) for z in hadamard(signed + [0.0] * (places - len(signed)))]
    return out


def unrotate(rotated: list[float], count: int, bucket: int, key: Key) -> list[float]:
    out = []
    for at in range(0, count, bucket):
        places = places_of(min(bucket, count - at))
        scale = 1 / math.sqrt(places)
        plain = hadamard(rotated[at : at + places])[: count - at]
        out += [narrow((-x if minus(i, key) else x) * scale) for i, x in enumerate(plain, at)]
    return out


def encode(values: np.ndarray, bits: int, bucket: int, key: Key, rotated: bool = False, scaled: bool = False) -> bytes:
    s = 2**bits - 1
    x = values.astype(np.float32).tolist()
    if rotated:
        x = rotate(x, bucket, key)
    ranges, codes = b"", []
    for at in range(0, len(x), bucket):
        low, high = min(x[at : at + bucket]) + 0.0, max(x[at : at + bucket]) + 0.0
        ends = (np.float32(low), np.float32(high))
        if scaled:
            beta = (beta_rotated if rotated else beta_uniform)(len(x[at : at + bucket]), s)
            ends = (divided(low, beta), divided(high, beta))
        ranges += struct.pack("<ff", *ends)
        scale = s / (high - low) if high > low else 0.0
        for i, v in enumerate(x[at : at + bucket], at):
            codes.append(min(math.floor((v - low) * scale + float(uniform(i, *key))), s))
    return struct.pack("<II", bits + 128 * rotated, bucket) + ranges + pack(codes, bits)


def decode(section: bytes, count: int, key: Key) -> np.ndarray:
    setting, bucket = struct.unpack_from("<II", section)
    bits, rotated = setting & 127, setting >= 128
    buckets = -(-count // bucket)
    places = count
    if rotated and count % bucket:
        places += places_of(count % bucket) - count % bucket
    ends = struct.unpack_from(f"<{2 * buckets}f", section, 8)
    out = []
    for i, code in enumerate(unpack(section[8 + 8 * buckets :], places, bits)):
        low, high = ends[2 * (i // bucket)], ends[2 * (i // bucket) + 1]
        out.append(float(np.float32(low + code * ((high - low) / (2**bits - 1)))))
    return np.array(unrotate(out, count, bucket, key) if rotated else out, np.float64).astype(np.float32)
