"""Half: values in 16 bits."""

from typing import Any, Literal

import numpy as np

from hvd_deepreduce.codec import U8, U32, Floats, Key, ValueCodec, value_codecs


def to_bfloat16(values: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """The upper 16 bits of each float32, rounded to nearest, ties to even; never up to infinity."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where((rounded & 0x7FFF) == 0x7F80, rounded - 1, rounded).astype(np.uint16)


@value_codecs.register
class Half(ValueCodec):
    """IEEE float16 or bfloat16, rounded to nearest. 16 bits a kept element.

    Lost: all but 11 (float16) or 8 (bfloat16) significant bits. float16 reaches from 6e-8 to 65504: smaller values
    become 0, larger ones +-65504. The residual keeps what is lost. Section: one byte (0 float16, 1 bfloat16), one
    zero byte, the values.

    Attributes:
        dtype: ``bfloat16`` keeps float32's range, ``float16`` three more bits.
    """

    name = "half"
    id = 2
    dtype: Literal["float16", "bfloat16"] = "bfloat16"

    def encode(self, values: Floats, support: U32 | None, key: Key) -> tuple[U8, U32 | None]:
        section = np.zeros(values.size + 1, np.uint16)
        limit = np.finfo(np.float16 if self.dtype == "float16" else np.float32).max
        clipped = np.clip(values, -limit, limit).astype(np.float32)
        if self.dtype == "float16":
            section[1:] = clipped.astype(np.float16).view(np.uint16)
        else:
            section[0] = 1
            section[1:] = to_bfloat16(clipped)
        return section.view(np.uint8), None

    @staticmethod
    def decode(section: U8, count: int, support: U32 | None, dtype: np.dtype[Any], key: Key) -> Floats:
        if section.size != 2 * (count + 1):
            raise ValueError(f"{count} values of 16 bits take {2 * (count + 1)} bytes, not {section.size}")
        words = section.view(np.uint16)
        if words[0] > 1:
            raise ValueError(f"the 16-bit format is 0 (float16) or 1 (bfloat16), not {words[0]}")
        values: Floats
        if words[0] == 0:
            values = words[1:].view(np.float16).astype(np.float32)
        else:
            values = (words[1:].astype(np.uint32) << 16).view(np.float32)
        if not np.isfinite(values).all():
            raise ValueError("a 16-bit value is not finite")
        return values
