"""3LC: three-value quantization with a sparsity multiplier, five digits to a byte, runs of zeros in one byte.

Lim, Andersen, Kaminsky, "3LC: lightweight and effective traffic compression for distributed machine learning", SysML
2019, section 3.
"""

import struct
from typing import Any

import numpy as np
from pydantic import Field

from hvd_deepreduce.codec import U8, U32, Floats, JointCodec, Key, joint_codecs
from hvd_deepreduce.ops import arrays, qsgd, sections, select, ternary
from hvd_deepreduce.value.buckets import F32

HEADER = struct.Struct("<f")


@joint_codecs.register
class ThreeLC(JointCodec):
    """With M = s * max|x|, every one of the ``numel`` elements becomes M * round(x / M): -M, 0 or M; no random choice.

    No element moves by more than M / 2, so error feedback is needed, as in the paper. Published for dense gradients
    (``sparsifier: none``): all elements are sent, 1.6 bits each and 0.11 where nearly all become 0. Behind another
    sparsifier, the elements that it left out are zeros; so are the kept ones below M / 2, which leave the support and
    stay in the residual. float64 values are rounded to float32 first.

    Section: ``| M float32 | digits of round(x / M) and runs as drawn in kernels/three_lc/three_lc.cpp |``.

    Attributes:
        multiplier: s, 1 to just below 2; a larger one sends fewer elements, each larger.
    """

    name = "three_lc"
    id = 3
    multiplier: float = Field(1.0, ge=1.0, lt=2.0)

    def encode(self, indices: U32 | None, values: Floats, numel: int, key: Key) -> tuple[U8, U32 | None]:
        x = arrays.to_float32(values)
        if indices is not None:
            kept, x = x, arrays.zeros(numel, np.float32, x)
            arrays.sum_into(x, [(indices, kept)], 1.0)
        norms = qsgd.bucket_norms(x, max(1, numel), False)
        largest = float(arrays.to_host(norms).max(initial=0.0))
        m = min(self.multiplier * largest, float(np.finfo(np.float32).max))
        # What is written, which is never below the largest magnitude: x / M stays within [-1, 1].
        header = HEADER.pack(m)
        packed = ternary.three_lc_pack(x, HEADER.unpack(header)[0])
        section = sections.join(header, ternary.zero_runs_encode(packed))
        if indices is None:
            return section, None
        decoded = _values(section, numel)
        return section, select.threshold(decoded, None, 0.0)[0]

    @staticmethod
    def decode(
        section: U8, numel: int, count: int, dense: bool, dtype: np.dtype[Any], key: Key
    ) -> tuple[U32 | None, Floats]:
        values = _values(section, numel)
        if dense:
            return None, values
        indices, kept = select.threshold(values, None, 0.0)
        if indices.size != count:
            raise ValueError(f"the 3LC section holds {indices.size} elements that are not zero, not {count}")
        return indices, kept


def _values(section: U8, numel: int) -> F32:
    if section.size < HEADER.size:
        raise ValueError(f"a 3LC section begins with {HEADER.size} bytes, and this one has {section.size}")
    (m,) = HEADER.unpack(sections.peek(section, HEADER.size))
    packed = ternary.zero_runs_decode(section[HEADER.size :], -(-numel // 5))
    values: F32 = ternary.three_lc_unpack(packed, numel, m)
    return values
