"""Fit-DExp: a double exponential through the sorted values.

Kostopoulou, Xu, Dutta, Li, Ntoulas, Kalnis, "DeepReduce: a sparse-tensor communication framework for distributed deep
learning", 2021, section 5 and section E of the appendix.
"""

from typing import Any

import numpy as np

from hvd_deepreduce.codecs.interfaces import U8, U32, Floats, RngKey, ValueCodec, value_codecs
from hvd_deepreduce.ops import arrays, curve_fit, sort


@value_codecs.register
class FitDExp(ValueCodec):
    """Sorts the values, and sends a e^(b x) + c e^(d x) for the magnitudes of each sign.

    Two linear least-squares systems give the curve: the rates b and d from an integral equation, then a and c. If the
    systems have no such solution (complex or equal rates, a straight line, one or two values), kernels/curve_fit/
    fit_dexp.h says which curve is used; it also draws the section. Zeros stay zeros, and a value keeps its sign and
    stays within the least and largest magnitude of its sign. float64 values are rounded to float32.

    Lost: the distance to the curve: 1% of the values' norm for the top 1% of normal variates, 10 to 20% for heavy tails
    (``fit_poly`` loses a tenth of that). Cost: the order, ceil(log2 r) bits for each kept element; and for the tensor
    8 bytes, and 24 for each sign.
    """

    name = "fit_dexp"
    id = 12
    sorts = True

    def encode(self, values: Floats, support: U32 | None, key: RngKey) -> tuple[U8, U32 | None]:
        ordered, order = sort.by_value(arrays.to_float32(values))
        return curve_fit.fit_dexp_encode(ordered), order

    @staticmethod
    def decode(section: U8, count: int, support: U32 | None, dtype: np.dtype[Any], key: RngKey) -> Floats:
        return curve_fit.fit_dexp_decode(section, count)
