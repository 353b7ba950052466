"""Natural compression: stochastic rounding to powers of two.

Horvath, Ho, Horvath, Sahu, Canini, Richtarik, "Natural compression for distributed deep learning", arXiv:1905.10988,
2019, section 2.
"""

from typing import Any

import numpy as np

from hvd_deepreduce.codecs.interfaces import U8, U32, Floats, RngKey, ValueCodec, value_codecs
from hvd_deepreduce.ops import arrays, natural, sections, sign


@value_codecs.register
class Natural(ValueCodec):
    """A magnitude within [2^e, 2^(e+1)) becomes 2^(e+1) with probability |x| / 2^e - 1, else 2^e; 0 stays. 9 bits each.

    Unbiased: E[decoded] = x; the variance is at most x^2 / 8 (theorem 1), and no value doubles or loses half of itself.
    Both ends of float32 are exceptions: below 2^-126 the choice is between 0 and 2^-126, unbiased but with a larger
    variance; from 2^127 on every magnitude becomes 2^127. float64 values are rounded to float32 first.

    Section: ``| signs, one bit each, set if below 0, to a whole byte | float32 exponents, one byte each, 0 for 0 |``.
    """

    name = "natural"
    id = 7

    def encode(self, values: Floats, support: U32 | None, key: RngKey) -> tuple[U8, U32 | None]:
        x = arrays.to_float32(values)
        return sections.join(b"", sign.encode(x), natural.encode(x, *key)), None

    @staticmethod
    def decode(section: U8, count: int, support: U32 | None, dtype: np.dtype[Any], key: RngKey) -> Floats:
        exponents_at = (count + 7) // 8
        if section.size != exponents_at + count:
            raise ValueError(f"{count} signs and exponents take {exponents_at + count} bytes, not {section.size}")
        return natural.decode(section[:exponents_at], section[exponents_at:])
