"""Uniform: stochastic rounding to evenly spaced levels between the least and the largest value of a bucket.

Zhang, Li, Kara, Alistarh, Liu, Zhang, "ZipML: training linear models with end-to-end low precision, and a little bit of
deep learning", ICML 2017, section 2. Suresh, Yu, Kumar, McMahan, "Distributed mean estimation with limited
communication", ICML 2017, sections 2 and 3: stochastic k-level and stochastic rotated quantization. Basu, Data,
Karakus, Diggavi, "Qsparse-local-SGD", NeurIPS 2019, section 2: both as quantizers Q_s after top-k and random-k.
"""

from math import log2
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from hvd_deepreduce.codecs.interfaces import U8, U32, Floats, RngKey, value_codecs
from hvd_deepreduce.codecs.value.groups import UnbiasedQuantizer, join, split
from hvd_deepreduce.ops import arrays, rotation, uniform
from hvd_deepreduce.ops.bits import pack, unpack

ROTATED = 0x80
"""The bit of the section's setting that marks rotated values."""


@value_codecs.register
class Uniform(UnbiasedQuantizer):
    """A value x of a bucket within [low, high] becomes low + l * (high - low) / s, with s = 2^bits - 1.

    l = floor((x - low) / (high - low) * s + u), u uniform in [0, 1). Unbiased: E[decoded] = x; no value changes by
    a level or more, and its variance is at most a quarter of the square of a level: at most m / (2 s^2) * ||x||^2 for
    a bucket of m values. ``bits + 64 / bucket_size`` bits for each kept element. The levels cover the values' range,
    which suits values of one sign or far from 0; 0 itself is seldom a level. float64 values are rounded to float32
    first.

    With ``rotate``, each bucket is first multiplied by random signs and by the Walsh-Hadamard matrix, which spreads a
    large value over the bucket: the variance is then at most 2 log2(2 m) / s^2 * ||x||^2. That pays for few bits and
    values of very different sizes. The last bucket is filled with zeros up to a power of two, which are sent too.

    Section: as in codecs/value/groups.py, with setting ``bits`` (128 more with ``rotate``), scales (low, high) for each
    bucket, and codes of ``bits`` bits.

    Attributes:
        bits: 1 to 16.
        bucket_size: the number of values that share a range, 1 to 2^31; a power of two with ``rotate``. From the number
            of all values on, there is one bucket, as published.
        rotate: rotate each bucket at random.
        fit_scale: fit each bucket's range to its codes by least squares, so that the error is at most the values. It
            gives up the unbiasedness. None: if there is error feedback and the variance can exceed ``||x||^2``.
        scaled: as in ``qsgd``.
    """

    name = "uniform"
    id = 5
    bits: int = Field(8, ge=1, le=16)
    bucket_size: int = Field(512, ge=1, le=2**31)
    rotate: bool = Field(False, strict=True)

    @model_validator(mode="after")
    def _check_rotation(self) -> "Uniform":
        if self.rotate and self.bucket_size & (self.bucket_size - 1):
            raise ValueError(
                f"value.bucket_size is {self.bucket_size} and value.rotate is True: a bucket that is rotated has a "
                "power of two of values, such as 512"
            )
        return self

    def variance_of(self, count: int) -> float:
        # The range is at most sqrt(2) times the l2 norm; Qsparse-local-SGD, section 2.
        m, s = float(count), 2.0**self.bits - 1
        return (2 * log2(2 * m) if self.rotate else m / 2) / (s * s)

    def encode(self, values: Floats, support: U32 | None, key: RngKey) -> tuple[U8, U32 | None]:
        x, steps = arrays.to_float32(values), 2**self.bits - 1
        if self.rotate:
            x = rotation.rotate(x, self.bucket_size, *key[:3])
        ranges, codes = uniform.encode(x, self.bucket_size, steps, *key)
        if self.fit_scale:
            ranges = uniform.fit_ranges(x, codes, ranges, self.bucket_size, steps)
        if self.scaled:
            self.divide(ranges, x.size, self.bucket_size)
        setting = self.bits | (ROTATED if self.rotate else 0)
        return join(setting, self.bucket_size, ranges, pack(codes, self.bits)), None

    @staticmethod
    def decode(section: U8, count: int, support: U32 | None, dtype: np.dtype[Any], key: RngKey) -> Floats:
        setting, entropy, bucket_size, ranges, packed = split(section, count, width=2)
        bits, rotated = setting & ~ROTATED, bool(setting & ROTATED)
        if not 1 <= bits <= 16 or entropy:
            raise ValueError(f"uniform codes have 1 to 16 bits and no entropy coder, not {bits} bits and {entropy}")
        if rotated and bucket_size & (bucket_size - 1):
            raise ValueError(f"rotated values are in buckets of a power of two, not of {bucket_size}")
        places, steps = rotation.rotated_count(count, bucket_size) if rotated else count, 2**bits - 1
        if packed.size != (places * bits + 7) // 8:
            raise ValueError(f"{places} codes of {bits} bits take {(places * bits + 7) // 8} bytes, not {packed.size}")
        decoded = uniform.decode(ranges, unpack(packed, places, bits, uniform.code_dtype(steps)), bucket_size, steps)
        return rotation.unrotate(decoded, count, bucket_size, *key[:3]) if rotated else decoded
