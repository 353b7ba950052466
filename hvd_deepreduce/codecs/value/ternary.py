"""Ternary: every value of a bucket becomes -m, 0 or m.

Wen, Xu, Yan, Wu, Wang, Chen, Li, "TernGrad: ternary gradients to reduce communication in distributed deep learning",
NeurIPS 2017, sections 3.1 and 3.3.
"""

from math import sqrt
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from hvd_deepreduce.codecs.interfaces import U8, U32, Floats, RngKey, value_codecs
from hvd_deepreduce.codecs.value.groups import UnbiasedQuantizer, join, split
from hvd_deepreduce.ops import arrays, groups, qsgd, ternary


@value_codecs.register
class Ternary(UnbiasedQuantizer):
    """A value x becomes sign(x) * m with probability |x| / m, else 0; m is the bucket's largest magnitude.

    Unbiased: E[decoded] = x; the variance of one value is |x| * (m - |x|). With ``clip`` c, values beyond c standard
    deviations of their bucket are first clipped to that: m and the variance become smaller, and the clipping is a bias.
    The deviation is measured from 0, since the paper assumes gradients to be normal with mean 0. Five digits to a byte,
    1.6 + 32 / bucket_size bits for each kept element. float64 values are rounded to float32 first.

    The variance can exceed the square of the values, and the paper uses no error feedback. With error feedback,
    ``fit_scale`` keeps the residual from growing from step to step.

    Section: as in codecs/value/groups.py, with setting 0, one scale m for each bucket, and digits as drawn in
    kernels/ternary/trits.h.

    Attributes:
        bucket_size: the number of values that share m, 1 to 2^31; fewer lower the variance. None: all, as published.
        clip: 1 to 100 standard deviations; 2.5 in the paper. None: no clipping.
        fit_scale: as in ``qsgd``.
        scaled: as in ``qsgd``; not with ``clip``, whose bias lemma 1 excludes.
    """

    name = "ternary"
    id = 4
    bucket_size: int | None = Field(512, ge=1, le=2**31)
    clip: float | None = Field(None, ge=1.0, le=100.0)

    @model_validator(mode="after")
    def _check_clip(self) -> "Ternary":
        if self.scaled and self.clip is not None:
            raise ValueError(
                f"value.scaled is True and value.clip is {self.clip}: the division by 1 + beta is for values whose "
                "mean is kept, and clipping changes it; leave one of them out"
            )
        return self

    def variance_of(self, count: int) -> float:
        # sum(|x| (m - |x|)) is at most n m^2 / 4 and at most m sqrt(n) ||x||, for n values.
        return min(count / 4, sqrt(count))

    def encode(self, values: Floats, support: U32 | None, key: RngKey) -> tuple[U8, U32 | None]:
        x = arrays.to_float32(values)
        bucket_size = self.bucket_size or max(1, x.size)
        scales = groups.norms(x, bucket_size, False)
        if self.clip is not None:
            scales = groups.clip_scales(scales, x, bucket_size, self.clip)
        # QSGD with one level; a value above the scale always gets that level, which clips it.
        digits = qsgd.quantize(x, scales, bucket_size, 1, *key)
        if self.fit_scale:
            scales = qsgd.fit_norms(x, digits, scales, bucket_size, 1)
        if self.scaled:
            self.divide(scales, x.size, bucket_size)
        return join(0, bucket_size, scales, ternary.pack(digits)), None

    @staticmethod
    def decode(section: U8, count: int, support: U32 | None, dtype: np.dtype[Any], key: RngKey) -> Floats:
        setting, entropy, bucket_size, scales, packed = split(section, count)
        if setting or entropy:
            raise ValueError(f"a ternary section begins with two zero bytes, not with {setting} and {entropy}")
        if packed.size != ternary.packed_size(count):
            raise ValueError(f"{count} ternary digits take {ternary.packed_size(count)} bytes, not {packed.size}")
        return qsgd.dequantize(scales, ternary.unpack(packed, count), bucket_size, 1)
