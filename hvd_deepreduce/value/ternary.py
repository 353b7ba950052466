"""Ternary: every value of a bucket becomes -m, 0 or m.

Wen, Xu, Yan, Wu, Wang, Chen, Li, "TernGrad: ternary gradients to reduce communication in distributed deep learning",
NeurIPS 2017, sections 3.1 and 3.3.
"""

from typing import Any

import numpy as np
from pydantic import Field

from hvd_deepreduce.codec import U8, U32, Floats, Key, ValueCodec, value_codecs
from hvd_deepreduce.ops import arrays, buckets, qsgd, ternary
from hvd_deepreduce.value.buckets import join, split


@value_codecs.register
class Ternary(ValueCodec):
    """A value x becomes sign(x) * m with probability |x| / m, else 0; m is the bucket's largest magnitude.

    Unbiased: E[decoded] = x; the variance of one value is |x| * (m - |x|). With ``clip`` c, values beyond c standard
    deviations of their bucket are first cut to that: m and the variance fall, and the cut is a bias. The deviation is
    taken from 0, as the paper holds gradients to be normal with mean 0. Five digits to a byte, 1.6 + 32 / bucket bits
    a kept element. float64 values are rounded to float32 first.

    The variance can pass the values' own square: an error feedback residual then grows from step to step, and the
    paper uses none. Set ``error_feedback: false`` with this codec.

    Section: value/buckets.py's, with setting 0, a scale m a bucket, and codes as drawn in
    kernels/three_lc/three_lc.cpp.

    Attributes:
        bucket: values that share m, 1 to 2^31; fewer lower the variance. None: all, as published.
        clip: 1 to 100 standard deviations; 2.5 in the paper. None: no clipping.
    """

    name = "ternary"
    id = 4
    bucket: int | None = Field(512, ge=1, le=2**31)
    clip: float | None = Field(None, ge=1.0, le=100.0)

    def encode(self, values: Floats, support: U32 | None, key: Key) -> tuple[U8, U32 | None]:
        x = arrays.to_float32(values)
        bucket = self.bucket or max(1, x.size)
        scales = qsgd.bucket_norms(x, bucket, False)
        if self.clip is not None:
            scales = buckets.clip_scales(scales, x, bucket, self.clip)
        # QSGD with one level: a value above the scale takes that level for certain, which is the clipping.
        digits = qsgd.quantize(x, scales, bucket, 1, *key)
        return join(0, bucket, scales, ternary.trits_pack(digits)), None

    @staticmethod
    def decode(section: U8, count: int, support: U32 | None, dtype: np.dtype[Any], key: Key) -> Floats:
        setting, entropy, bucket, scales, packed = split(section, count)
        if setting or entropy:
            raise ValueError(f"a ternary section begins with two zero bytes, not with {setting} and {entropy}")
        if packed.size != -(-count // 5):
            raise ValueError(f"{count} ternary digits take {-(-count // 5)} bytes, not {packed.size}")
        return qsgd.dequantize(scales, ternary.trits_unpack(packed, count), bucket, 1)
