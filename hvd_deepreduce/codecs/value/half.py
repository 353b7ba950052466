"""Half: values in 16 bits."""

from typing import Any, Literal

import numpy as np

from hvd_deepreduce.codecs.interfaces import U8, U32, Floats, RngKey, ValueCodec, value_codecs
from hvd_deepreduce.ops import half


@value_codecs.register
class Half(ValueCodec):
    """IEEE float16 or bfloat16, rounded to nearest. 16 bits a kept element.

    Lost: all but 11 (float16) or 8 (bfloat16) significant bits. float16 has magnitudes from 6e-8 to 65504: smaller
    values become 0, larger ones +-65504. The residual keeps what is lost. Section: one byte (0 float16, 1 bfloat16),
    one zero byte, the values.

    Attributes:
        dtype: ``bfloat16`` keeps the range of float32, ``float16`` keeps three more bits.
    """

    name = "half"
    id = 2
    dtype: Literal["float16", "bfloat16"] = "bfloat16"

    def layout(self, count: int, itemsize: int) -> tuple[bytes, int] | None:
        return bytes([self.dtype == "bfloat16", 0]), 2 * (count + 1)

    def encode(self, values: Floats, support: U32 | None, key: RngKey) -> tuple[U8, U32 | None]:
        return half.encode(values, self.dtype == "bfloat16"), None

    @staticmethod
    def decode(section: U8, count: int, support: U32 | None, dtype: np.dtype[Any], key: RngKey) -> Floats:
        if section.size != 2 * (count + 1):
            raise ValueError(f"{count} values of 16 bits take {2 * (count + 1)} bytes, not {section.size}")
        return half.decode(section, count)
