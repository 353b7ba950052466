"""3LC: three-value quantization with a sparsity multiplier, five digits to a byte, runs of zeros in one byte.

Lim, Andersen, Kaminsky, "3LC: lightweight and effective traffic compression for distributed machine learning", SysML
2019, section 3.
"""

import struct
from typing import Any

import numpy as np
from pydantic import Field

from hvd_deepreduce.codecs.interfaces import U8, U32, Floats, JointCodec, RngKey, joint_codecs
from hvd_deepreduce.ops import arrays, groups, sections, select, three_lc
from hvd_deepreduce.ops.ternary import packed_size
from hvd_deepreduce.ops.types import F32

HEADER = struct.Struct("<f")


@joint_codecs.register
class ThreeLC(JointCodec):
    """With M = s * max|x|, every one of the ``numel`` elements becomes M * round(x / M): -M, 0 or M; no random choice.

    An element changes by up to M / 2, so error feedback is needed, as in the paper. Published for dense gradients
    (``sparsifier: none``): all elements are sent, with 1.6 bits each, or 0.11 if nearly all become 0. After another
    sparsifier, the elements that are not kept are zeros, and so are the kept ones below M / 2, which leave the support
    and stay in the residual. float64 values are rounded to float32 first.

    Section: ``| M float32 | packed digits of round(x / M), with runs, as drawn in kernels/three_lc/three_lc.h |``.

    Attributes:
        multiplier: s, 1 to just below 2; a larger one sends fewer and larger elements.
    """

    name = "three_lc"
    id = 3
    multiplier: float = Field(1.0, ge=1.0, lt=2.0)

    def encode(self, indices: U32 | None, values: Floats, numel: int, key: RngKey) -> tuple[U8, U32 | None]:
        x = arrays.to_float32(values)
        if indices is not None:
            kept, x = x, arrays.zeros(numel, np.float32, x)
            arrays.sum_into(x, [(indices, kept)], 1.0)
        largest = float(arrays.to_host(groups.norms(x, max(1, numel), False)).max(initial=0.0))
        header = HEADER.pack(min(self.multiplier * largest, float(np.finfo(np.float32).max)))
        # M as float32, as it is written. It is not below the largest magnitude: x / M stays within [-1, 1].
        (m,) = HEADER.unpack(header)
        section = sections.join(header, three_lc.zero_runs_encode(three_lc.pack(x, m)))
        if indices is None:
            return section, None
        decoded = _values(section, numel)
        return section, select.threshold(decoded, None, 0.0)[0]

    @staticmethod
    def decode(
        section: U8, numel: int, count: int, dense: bool, dtype: np.dtype[Any], key: RngKey
    ) -> tuple[U32 | None, Floats]:
        values = _values(section, numel)
        if dense:
            return None, values
        indices, kept = select.threshold(values, None, 0.0)
        if indices.size != count:
            raise ValueError(f"the 3LC section has {indices.size} elements that are not zero, not {count}")
        return indices, kept


def _values(section: U8, numel: int) -> F32:
    """All elements: float32 ``[numel]``."""
    if section.size < HEADER.size:
        raise ValueError(f"a 3LC section begins with {HEADER.size} bytes, and this one has {section.size}")
    (m,) = HEADER.unpack(sections.peek(section, HEADER.size))
    packed = three_lc.zero_runs_decode(section[HEADER.size :], packed_size(numel))
    return three_lc.unpack(packed, numel, m)
