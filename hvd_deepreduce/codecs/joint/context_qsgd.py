"""Context QSGD: indices by the adaptive coder of ``context``, and QSGD's codes by its models, in one pass.

QSGD: Alistarh, Grubic, Li, Tomioka, Vojnovic, NeurIPS 2017, section 3.1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import Field

from hvd_deepreduce.codecs.interfaces import U8, U32, Floats, JointCodec, RngKey, joint_codecs
from hvd_deepreduce.codecs.value import groups
from hvd_deepreduce.ops import arrays, context, qsgd, sections


@joint_codecs.register
class ContextQSGD(JointCodec):
    """The indices of ``context`` and the codes of ``qsgd``, whose high four bits are coded in their own contexts.

    A code's contexts are how many elements its window has, and the magnitude of the code before. Each bucket's norm,
    the largest magnitude, is fitted to the codes by least squares, as ``qsgd`` does with ``fit_scale``, so that an
    error is at most the value. float64 values are rounded to float32 first. It runs on one core of the host, also for
    gradients on a GPU.

    Section: ``| bits u8 | 0 u8 | 0 u16 | bucket size u32 | norms float32 | section of kernels/context/context.cpp |``.

    Attributes:
        bits: of a code, 2 to 8, including the sign.
        bucket_size: the number of values that share a norm, 1 to 2^31.
    """

    name = "context_qsgd"
    id = 5
    bits: int = Field(3, ge=2, le=8)
    bucket_size: int = Field(512, ge=1, le=2**31)

    def encode(self, indices: U32 | None, values: Floats, numel: int, key: RngKey) -> tuple[U8, U32 | None]:
        x, levels = arrays.to_float32(values), qsgd.levels_of(self.bits)
        norms, codes = qsgd.norms_and_codes(x, self.bucket_size, levels, False, *key)
        norms = qsgd.fit_norms(x, codes, norms, self.bucket_size, levels)
        places = np.arange(numel, dtype=np.uint32) if indices is None else arrays.to_host(indices)
        coded = context.encode(places, numel, arrays.to_host(codes), self.bits) if x.size else places.view(np.uint8)
        header = groups.HEADER.pack(self.bits, 0, 0, self.bucket_size)
        return sections.join(header, norms, arrays.move_like(coded, x)), indices

    @staticmethod
    def decode(
        section: U8, numel: int, count: int, dense: bool, dtype: np.dtype[Any], key: RngKey
    ) -> tuple[U32 | None, Floats]:
        bits, zero, bucket_size, norms, coded = groups.split(section, count)
        if not 2 <= bits <= 8 or zero:
            raise ValueError(f"it has {bits} bits and {zero} in a reserved byte; 2 to 8, and 0, are allowed")
        if count == 0:
            if coded.size:
                raise ValueError(f"{coded.size} bytes follow the header, and no elements take none")
            return (None if dense else coded.view(np.uint32)), norms
        indices, codes = context.decode(arrays.to_host(coded), numel, count, bits)
        values = qsgd.dequantize(norms, arrays.move_like(codes, norms), bucket_size, qsgd.levels_of(bits))
        return (None if dense else arrays.move_like(indices, section)), values
