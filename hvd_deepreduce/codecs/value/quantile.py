"""Quantile: each value as the number of its quantile bucket.

Jiang, Fu, Yang, Cui, "SketchML: accelerating distributed machine learning with data sketches", SIGMOD 2018; as
described in Jiang, Fu, Yang, Shao, Cui, "SKCompress: compressing sparse and nonuniform gradient in distributed machine
learning", VLDB Journal 2020, section 4.1 and appendix A.1. Without separate signs and with a Huffman code, as in
Kostopoulou et al., "DeepReduce", 2021, section 6.3 (SKCompress without MinMaxSketch).
"""

import struct
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from hvd_deepreduce.codecs.entropy import CODERS, ENTROPY_IDS
from hvd_deepreduce.codecs.interfaces import U8, U32, Floats, RngKey, ValueCodec, value_codecs
from hvd_deepreduce.ops import arrays, bits, deferred, quantile, sections

HEADER = struct.Struct("<I")
ENTROPY_AT = 24
"""The first bit of the entropy coder's number in the section's first word. The number of buckets takes 17 bits."""


@value_codecs.register
class Quantile(ValueCodec):
    """Buckets between quantiles hold equally many values each; a value is sent as its bucket's number.

    Negative and positive values have separate buckets, in proportion to their numbers, and zeros have one more: a value
    never changes its sign, and zero stays zero. (If ``buckets`` is 2 and there are both signs and zeros, zeros count as
    positive.) Equal buckets are merged, and a value that would fill a bucket alone is exact. The quantiles are exact,
    from a radix sort. The papers use a quantile sketch (Yahoo DataSketches); it draws its own random numbers, so two
    runs would not give the same bytes, nor would host and GPU, and a kept vector is short enough to sort.

    ceil(log2 q) + 32 q / r bits for each kept element, for q buckets and r values. With the buckets' means or middles,
    the squared error of the n values of a sign that share b buckets is at most ceil(n / b) / 4 times the square of the
    largest of them, and at most twice that if values are equal. Theorem 2 has r / 4q * (smallest^2 + largest^2) for
    both signs, as if each bucket had r / q values: r = 129 values in q = 128 buckets can lose 1.98 times that. Without
    separate signs, the error is at most ceil(r / q) / 4 * (largest - smallest)^2. float64 values are rounded to float32
    first.

    With ``splits: lloyd`` the buckets of each sign have nearly the least squared error that their number allows
    (Lloyd's algorithm, with splits at 32 places an octave), and zeros count as positive values. Such buckets are not
    equally full, which an entropy coder uses: with 4 buckets of the top 1.6% of normal values, a value takes 1.84 bits
    in place of 2, and the squared error is 0.4% of the values', 0.72 times that of equally full buckets.

    Equally full buckets leave an entropy coder nothing to save; but where many values are equal, as zeros are, their
    bucket is fuller.

    Section: ``| buckets + 2^24 * entropy u32 | means float32 [buckets] | numbers |``, empty if no value is kept; the
    numbers have ceil(log2 buckets) bits each (entropy 0), or are a section of codecs/entropy/huffman.py (1) or
    codecs/entropy/rans.py (2). kernels/quantile/quantile.h draws the order of the buckets.

    Attributes:
        buckets: the most buckets, 2 to 65536; a power of two uses all bits.
        center: what a bucket is decoded to: the ``mean`` of its values, which has the least squared error, or the
            ``middle`` between its two quantiles, as in the paper. The last bucket ends at the largest value, so its
            middle is far above most of its values if the tail is heavy: under error feedback, what was sent too much
            comes back with the opposite sign, and ``mean`` is better.
        splits: where buckets end: at ``quantile`` they are equally full, with ``lloyd`` the squared error is least.
        separate_signs: off, values of both signs share their buckets, as in the paper before its solution 1, and a
            value near 0 can change its sign.
        entropy: a coder of the numbers, used if it takes fewer bytes; with at most 256 buckets.
    """

    name = "quantile"
    id = 10
    buckets: int = Field(256, ge=2, le=65536)
    center: Literal["mean", "middle"] = "mean"
    splits: Literal["quantile", "lloyd"] = "quantile"
    separate_signs: bool = Field(True, strict=True)
    entropy: Literal["none", "huffman", "rans"] = "none"

    @model_validator(mode="after")
    def _check_symbols(self) -> "Quantile":
        if self.entropy != "none" and self.buckets > 256:
            raise ValueError(
                f"value.buckets is {self.buckets} and value.entropy is {self.entropy!r}, which codes at most 256 "
                "different numbers: use at most 256 buckets, or set entropy to 'none'"
            )
        return self

    @model_validator(mode="after")
    def _check_splits(self) -> "Quantile":
        if self.splits == "lloyd" and (self.center != "mean" or not self.separate_signs):
            raise ValueError(
                f"value.splits is 'lloyd', value.center is {self.center!r} and value.separate_signs is "
                f"{self.separate_signs}: the squared error is least with the buckets' means, and each sign has its own "
                "splits. Leave center and separate_signs out, or set splits to 'quantile'"
            )
        return self

    def encode(self, values: Floats, support: U32 | None, key: RngKey) -> tuple[U8, U32 | None]:
        if values.size == 0:
            return values.view(np.uint8), None
        x = arrays.to_float32(values)
        if self.splits == "lloyd":
            means, codes = quantile.lloyd(x, self.buckets)
        else:
            means, codes, _ = quantile.encode(x, self.buckets, self.center == "middle", self.separate_signs)
        numbers, entropy = bits.pack(codes, (means.size - 1).bit_length()), 0
        if self.entropy != "none":
            coded = CODERS[ENTROPY_IDS[self.entropy]].encode(bits.pack(codes, 8))
            if coded.size < numbers.size:
                numbers, entropy = coded, ENTROPY_IDS[self.entropy]
        return sections.join(HEADER.pack(means.size | entropy << ENTROPY_AT), means, numbers), None

    @staticmethod
    def decode(section: U8, count: int, support: U32 | None, dtype: np.dtype[Any], key: RngKey) -> Floats:
        if count == 0 and section.size == 0:
            return section.view(np.float32)
        if section.size < 4:
            raise ValueError(f"a quantile section begins with 4 bytes, and this one has {section.size}")
        (word,) = HEADER.unpack(sections.peek(section, HEADER.size))
        buckets, entropy = word & (1 << ENTROPY_AT) - 1, word >> ENTROPY_AT
        if not 1 <= buckets <= min(count, 65536) or entropy > 2:
            raise ValueError(
                f"{count} values have 1 to {min(count, 65536)} buckets and the entropy coders 0 to 2, not {buckets} "
                f"buckets and coder {entropy}"
            )
        codes_at = 4 + 4 * buckets
        if section.size < codes_at:
            raise ValueError(f"the means of {buckets} buckets do not fit into {section.size} bytes")
        means, numbers, width = section[4:codes_at].view(np.float32), section[codes_at:], (buckets - 1).bit_length()
        if entropy:
            numbers, width = CODERS[entropy].decode(numbers, count), 8
        elif numbers.size != (count * width + 7) // 8:
            raise ValueError(f"{count} values in {buckets} buckets do not take {section.size} bytes")
        deferred.check_finite(means)
        codes: U32 = bits.unpack(numbers, count, width, np.uint32)
        return quantile.decode(means, codes)
