"""Sign: one bit a value, and the mean magnitude.

Karimireddy, Rebjock, Stich, Jaggi, "Error feedback fixes SignSGD and other gradient compression schemes", ICML 2019,
algorithm 1; after top-k: SignTop_k of Basu, Data, Karakus, Diggavi, "Qsparse-local-SGD", NeurIPS 2019, lemma 2.
"""

import struct
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from pydantic import Field

from hvd_deepreduce.codecs.interfaces import U8, U32, Floats, RngKey, value_codecs
from hvd_deepreduce.codecs.value.groups import HEADER, BucketQuantizer, join, split
from hvd_deepreduce.ops import arrays, groups, sections, sign

ONE = struct.pack("<f", 1.0)


@value_codecs.register
class Sign(BucketQuantizer):
    """A value x becomes (sum of a bucket's |x|) / (its size) * sign(x), with sign(0) = 1; with ``magnitude: one``,
    sign(x), so that each rank has one vote in a sum. 1 + 32 / bucket_size bits each.

    Lost: all differences of magnitude, and for good without error feedback, since E[decoded] is not x. With v the
    values of a bucket of size n, the squared norm of the error is (1 - ||v||_1^2 / (n * ||v||_2^2)) * ||v||_2^2, less
    than that of v. The sum is computed in float64, in the order that kernels/buckets/buckets.h defines. float64 values
    are rounded to float32 first.

    Section: as in value/groups.py, with setting 0 whatever the magnitude is, one scale for each bucket, and one bit for
    each value, set if the value is below 0.

    Attributes:
        bucket_size: the number of values that share a scale, 1 to 2^31; fewer lose less. None: all, as published.
        magnitude: ``mean``, that of a bucket's values; or ``one``, whose errors no residual can keep: it is for the
            memory ``scaled_momentum``, or for no error feedback.
    """

    name = "sign"
    id = 6
    bucket_size: int | None = Field(None, ge=1, le=2**31)
    magnitude: Literal["mean", "one"] = "mean"

    def unused_settings(self) -> Iterator[tuple[str, str, str]]:
        if self.magnitude == "one":
            yield "bucket_size", "magnitude", "magnitude is 'one', so that all values have one scale"

    def encode(self, values: Floats, support: U32 | None, key: RngKey) -> tuple[U8, U32 | None]:
        x = arrays.to_float32(values)
        bucket_size = self.bucket_size or max(1, x.size)
        if self.magnitude == "one":
            head = HEADER.pack(0, 0, 0, bucket_size) + ONE[: 4 * x.size]
            return sections.join(head, sign.encode(x)), None
        return join(0, bucket_size, groups.means(x, bucket_size), sign.encode(x)), None

    @staticmethod
    def decode(section: U8, count: int, support: U32 | None, dtype: np.dtype[Any], key: RngKey) -> Floats:
        setting, entropy, bucket_size, scales, signs = split(section, count)
        if setting or entropy:
            raise ValueError(f"a section of signs begins with two zero bytes, not with {setting} and {entropy}")
        if signs.size != (count + 7) // 8:
            raise ValueError(f"{count} signs take {(count + 7) // 8} bytes, not {signs.size}")
        return sign.decode(signs, scales, count, bucket_size)
