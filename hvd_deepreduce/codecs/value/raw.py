"""Raw: the values as they are."""

from typing import Any

import numpy as np

from hvd_deepreduce.codecs.interfaces import U8, U32, Floats, RngKey, ValueCodec, value_codecs


@value_codecs.register
class Raw(ValueCodec):
    """Values as little-endian float32 (float64 for float64 tensors). 32 (64) bits a kept element; lossless."""

    name = "raw"
    id = 1

    def layout(self, count: int, itemsize: int) -> tuple[bytes, int] | None:
        return b"", itemsize * count

    def encode(self, values: Floats, support: U32 | None, key: RngKey) -> tuple[U8, U32 | None]:
        return values.view(np.uint8), None

    @staticmethod
    def decode(section: U8, count: int, support: U32 | None, dtype: np.dtype[Any], key: RngKey) -> Floats:
        if section.size != dtype.itemsize * count:
            raise ValueError(f"{count} {dtype} values take {dtype.itemsize * count} bytes, not {section.size}")
        values: Floats = section.view(dtype)
        return values
