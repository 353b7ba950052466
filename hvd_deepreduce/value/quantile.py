"""Quantile: each value as the number of its quantile bucket.

Jiang, Fu, Yang, Cui, "SketchML: accelerating distributed machine learning with data sketches", SIGMOD 2018; as
described in Jiang, Fu, Yang, Shao, Cui, "SKCompress: compressing sparse and nonuniform gradient in distributed machine
learning", VLDB Journal 2020, section 4.1 and appendix A.1.
"""

import struct
from typing import Any, Literal

import numpy as np
from pydantic import Field

from hvd_deepreduce.codec import U8, U32, Floats, RngKey, ValueCodec, value_codecs
from hvd_deepreduce.ops import arrays, bits, deferred, quantile, sections

HEADER = struct.Struct("<I")


@value_codecs.register
class Quantile(ValueCodec):
    """Buckets between quantiles hold equally many values each; a value is sent as its bucket's number.

    Negative and positive values have separate buckets, in proportion to their numbers, and zeros have one more: a value
    never changes its sign, and zero stays zero. (If ``buckets`` is 2 and there are both signs and zeros, zeros count as
    positive.) Equal buckets are merged, and a value that would fill a bucket alone is exact. The quantiles are exact,
    from a radix sort. The papers use a quantile sketch (Yahoo DataSketches); it draws its own random numbers, so two
    runs would not give the same bytes, nor would host and GPU, and a kept vector is short enough to sort.

    ceil(log2 q) + 32 q / r bits for each kept element, for q buckets and r values. With the buckets' means or middles,
    the squared error of all values is at most r / 4q * (smallest^2 + largest^2) (theorem 2; all values different).
    float64 values are rounded to float32 first.

    Section: ``| buckets u32 | means float32 [buckets] | numbers, ceil(log2 buckets) bits each |``, empty if no value is
    kept; kernels/quantile/quantile.h draws the order of the buckets.

    Attributes:
        buckets: the most buckets, 2 to 65536; a power of two uses all bits.
        center: what a bucket is decoded to: the ``mean`` of its values, which has the least squared error, or the
            ``middle`` between its two quantiles, as in the paper. The last bucket ends at the largest value, so its
            middle is far above most of its values if the tail is heavy.
    """

    name = "quantile"
    id = 10
    buckets: int = Field(256, ge=2, le=65536)
    center: Literal["mean", "middle"] = "mean"

    def encode(self, values: Floats, support: U32 | None, key: RngKey) -> tuple[U8, U32 | None]:
        if values.size == 0:
            return values.view(np.uint8), None
        x = arrays.to_float32(values)
        means, codes, _ = quantile.encode(x, self.buckets, self.center == "middle")
        numbers = bits.pack(codes, (means.size - 1).bit_length())
        return sections.join(HEADER.pack(means.size), means, numbers), None

    @staticmethod
    def decode(section: U8, count: int, support: U32 | None, dtype: np.dtype[Any], key: RngKey) -> Floats:
        if count == 0 and section.size == 0:
            return section.view(np.float32)
        if section.size < 4:
            raise ValueError(f"a quantile section begins with 4 bytes, and this one has {section.size}")
        (buckets,) = HEADER.unpack(sections.peek(section, HEADER.size))
        if not 1 <= buckets <= min(count, 65536):
            raise ValueError(f"{count} values have 1 to {min(count, 65536)} buckets, not {buckets}")
        width = (buckets - 1).bit_length()
        codes_at = 4 + 4 * buckets
        if section.size != codes_at + (count * width + 7) // 8:
            raise ValueError(f"{count} values in {buckets} buckets do not take {section.size} bytes")
        means = section[4:codes_at].view(np.float32)
        deferred.check_finite(means)
        codes: U32 = bits.unpack(section[codes_at:], count, width, np.uint32)
        return quantile.decode(means, codes)
