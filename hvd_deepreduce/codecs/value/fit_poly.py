"""Fit-Poly: piecewise polynomials through the sorted values.

Kostopoulou, Xu, Dutta, Li, Ntoulas, Kalnis, "DeepReduce: a sparse-tensor communication framework for distributed deep
learning", 2021, section 5 (lemma 1) and sections C and E of the appendix (lemma 10: the choice of knots).
"""

from typing import Any

import numpy as np
from pydantic import Field

from hvd_deepreduce.codecs.interfaces import U8, U32, Floats, RngKey, ValueCodec, value_codecs
from hvd_deepreduce.ops import arrays, curve_fit, sort


@value_codecs.register
class FitPoly(ValueCodec):
    """Sorts the values, cuts the curve of each sign into segments, and sends a least-squares polynomial for each.

    A segment is cut at the point farthest from its chord, the segment with the farthest point first; a segment keeps at
    least ``degree + 1`` points. The polynomials are orthogonal on the segment's points, so the fit is well conditioned
    for any degree. Zeros stay zeros, and a value keeps its sign and stays within the least and largest magnitude of its
    sign. float64 values are rounded to float32.

    Lost: the distance to the curve: with the default settings 0.1 to 0.3% of the values' norm for the top 1% of normal
    variates, 1 to 3% for heavy tails. Cost: the order, ceil(log2 r) bits for each kept element; and for the tensor 12
    bytes, and for each sign up to 8 + 4 * segments * (degree + 2). kernels/curve_fit/fit_poly.h draws the section.

    Attributes:
        degree: of the polynomials, 0 to 15; 5 in the paper.
        segments: the most for a sign, 1 to 1024; more cost bytes and lose less. None: the paper's heuristic for the
            number of knots, ceil(2 sqrt(M)) (for degree 0: ceil(M / sqrt(2) - 1)), and one segment more. M is the
            difference between the curve's first and last step, in the unit of the values: the small values of most
            gradients get two segments.
    """

    name = "fit_poly"
    id = 11
    sorts = True
    degree: int = Field(5, ge=0, le=15)
    segments: int | None = Field(4, ge=1, le=1024)

    def encode(self, values: Floats, support: U32 | None, key: RngKey) -> tuple[U8, U32 | None]:
        ordered, order = sort.by_value(arrays.to_float32(values))
        return curve_fit.fit_poly_encode(ordered, self.degree, self.segments), order

    @staticmethod
    def decode(section: U8, count: int, support: U32 | None, dtype: np.dtype[Any], key: RngKey) -> Floats:
        return curve_fit.fit_poly_decode(section, count)
