"""QSGD: stochastic rounding to a few levels of a bucket's norm.

Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD: communication-efficient SGD via gradient quantization and encoding",
NeurIPS 2017, section 3.1.
"""

import struct
from typing import Any, Literal

import numpy as np
from pydantic import Field

from hvd_deepreduce.backend import cpu
from hvd_deepreduce.codec import U8, U32, Floats, Key, ValueCodec, value_codecs

HEADER = struct.Struct("<BxxxI")


@value_codecs.register
class QSGD(ValueCodec):
    """A value x of a bucket with norm n becomes sign(x) * l / s * n, l = floor(|x| / n * s + u), u uniform in [0, 1).

    s = 2^(bits - 1) - 1 levels a sign, so that a code fits ``bits`` bits. Unbiased: E[decoded] = x; the variance of a
    bucket of m values is at most min(m / s^2, sqrt(m) / s) * ||x||^2 (lemma 3.1). ``bits + 32 / bucket`` bits a kept
    element. float64 values are rounded to float32 first.

    Section: ``| bits u8 | 3 zero bytes | bucket u32 | norms float32 [ceil(r / bucket)] | codes, bits each |``; a code
    is s + sign * l.

    Attributes:
        bits: 2 to 8, the sign included.
        bucket: values that share a norm, 1 to 2^31.
        norm: ``max`` (the largest magnitude) uses all levels; ``l2`` is the paper's own, whose levels are coarse where
            the values of a bucket are alike, as after top-k.
    """

    name = "qsgd"
    id = 3
    bits: int = Field(7, ge=2, le=8)
    bucket: int = Field(512, ge=1, le=2**31)
    norm: Literal["max", "l2"] = "max"

    def encode(self, values: Floats, support: U32 | None, key: Key) -> tuple[U8, U32 | None]:
        if values.dtype != np.float32:
            limit = np.finfo(np.float32).max
            values = np.clip(values, -limit, limit).astype(np.float32)
        norms, codes = cpu.qsgd_encode(values, self.bucket, 2 ** (self.bits - 1) - 1, self.norm == "l2", *key)
        header = np.frombuffer(HEADER.pack(self.bits, self.bucket), np.uint8)
        return np.concatenate([header, norms.view(np.uint8), cpu.pack(codes, self.bits)]), None

    @staticmethod
    def decode(section: U8, count: int, support: U32 | None, dtype: np.dtype[Any], key: Key) -> Floats:
        if section.size < HEADER.size:
            raise ValueError(f"a QSGD section begins with {HEADER.size} bytes, and this one has {section.size}")
        bits, bucket = HEADER.unpack_from(section)
        if not 2 <= bits <= 8 or not 1 <= bucket <= 2**31:
            raise ValueError(f"QSGD has 2 to 8 bits and buckets of 1 to 2^31, not {bits} bits and buckets of {bucket}")
        codes_at = HEADER.size + 4 * -(-count // bucket)
        if section.size != codes_at + (count * bits + 7) // 8:
            raise ValueError(f"{count} values of {bits} bits in buckets of {bucket} do not take {section.size} bytes")
        norms = section[HEADER.size : codes_at].view(np.float32)
        codes = cpu.unpack(section[codes_at:], count, bits, np.uint8)
        return cpu.qsgd_decode(norms, codes, bucket, 2 ** (bits - 1) - 1)
