"""Sign: one bit a value, and the mean magnitude.

Karimireddy, Rebjock, Stich, Jaggi, "Error feedback fixes SignSGD and other gradient compression schemes", ICML 2019,
algorithm 1; behind top-k: SignTop_k of Basu, Data, Karakus, Diggavi, "Qsparse-local-SGD", NeurIPS 2019, lemma 3.
"""

from typing import Any

import numpy as np
from pydantic import Field

from hvd_deepreduce.codec import U8, U32, Floats, Key, ValueCodec, value_codecs
from hvd_deepreduce.ops import arrays, buckets, sign
from hvd_deepreduce.value.buckets import join, split


@value_codecs.register
class Sign(ValueCodec):
    """A value x becomes (sum of a bucket's |x|) / (its size) * sign(x), with sign(0) = 1. 1 + 32 / bucket bits each.

    Lost: all differences of magnitude, for good without error feedback: E[decoded] is not x. With v the values of a
    bucket of size n, what is lost has the squared norm (1 - ||v||_1^2 / (n * ||v||_2^2)) * ||v||_2^2, less than all.
    The sum is taken in float64, in the order of kernels/quantize/quantize.cpp. float64 values are rounded to float32
    first.

    Section: value/buckets.py's, with setting 0, a scale a bucket, and a bit a value, set where it is below 0.

    Attributes:
        bucket: values that share a scale, 1 to 2^31; fewer lose less. None: all, as published.
    """

    name = "sign"
    id = 6
    bucket: int | None = Field(None, ge=1, le=2**31)

    def encode(self, values: Floats, support: U32 | None, key: Key) -> tuple[U8, U32 | None]:
        x = arrays.to_float32(values)
        bucket = self.bucket or max(1, x.size)
        return join(0, bucket, buckets.bucket_means(x, bucket), sign.encode(x)), None

    @staticmethod
    def decode(section: U8, count: int, support: U32 | None, dtype: np.dtype[Any], key: Key) -> Floats:
        setting, entropy, bucket, scales, signs = split(section, count)
        if setting or entropy:
            raise ValueError(f"a section of signs begins with two zero bytes, not with {setting} and {entropy}")
        if signs.size != (count + 7) // 8:
            raise ValueError(f"{count} signs take {(count + 7) // 8} bytes, not {signs.size}")
        return sign.decode(signs, scales, count, bucket)
