"""Uniform: stochastic rounding to evenly spaced levels between the least and the largest value of a bucket.

Zhang, Li, Kara, Alistarh, Liu, Zhang, "ZipML: training linear models with end-to-end low precision, and a little bit of
deep learning", ICML 2017, section 2.
"""

from typing import Any, Literal

import numpy as np
from pydantic import Field

from hvd_deepreduce.codec import U8, U32, Floats, RngKey, value_codecs
from hvd_deepreduce.ops import arrays, uniform
from hvd_deepreduce.value.buckets import BucketQuantizer, join, split


@value_codecs.register
class Uniform(BucketQuantizer):
    """A value x of a bucket within [low, high] becomes low + l * (high - low) / s, with s = 2^bits - 1.

    l = floor((x - low) / (high - low) * s + u), u uniform in [0, 1). Unbiased: E[decoded] = x; no value changes by
    a level or more, and its variance is at most a quarter of the square of a level. ``bits + 64 / bucket_size`` bits
    for each kept element. The levels cover the values' range, which suits values of one sign or far from 0; 0 itself is
    seldom a level. float64 values are rounded to float32 first.

    Section: as in value/buckets.py, with setting ``bits``, scales (low, high) for each bucket, and codes of uint8 or
    uint16.

    Attributes:
        bits: 8 or 16.
        bucket_size: the number of values that share a range, 1 to 2^31.
    """

    name = "uniform"
    id = 5
    bits: Literal[8, 16] = 8
    bucket_size: int = Field(512, ge=1, le=2**31)

    def encode(self, values: Floats, support: U32 | None, key: RngKey) -> tuple[U8, U32 | None]:
        dtype = np.uint8 if self.bits == 8 else np.uint16
        x = arrays.to_float32(values)
        ranges, codes = uniform.encode(x, self.bucket_size, dtype, *key)
        return join(self.bits, self.bucket_size, ranges, codes), None

    @staticmethod
    def decode(section: U8, count: int, support: U32 | None, dtype: np.dtype[Any], key: RngKey) -> Floats:
        bits, entropy, bucket_size, ranges, codes = split(section, count, width=2)
        if bits not in (8, 16) or entropy:
            raise ValueError(f"uniform codes have 8 or 16 bits and no entropy coder, not {bits} bits and {entropy}")
        if codes.size != count * bits // 8:
            raise ValueError(f"{count} uniform codes of {bits} bits take {count * bits // 8} bytes, not {codes.size}")
        return uniform.decode(ranges, codes.view(np.uint8 if bits == 8 else np.uint16), bucket_size)
