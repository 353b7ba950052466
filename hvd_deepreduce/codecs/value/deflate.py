"""Deflate: the values' bytes through zlib. RFC 1950 and 1951; DR with Deflate in DeepReduce, section 4 and table 3."""

import zlib
from typing import Any

import numpy as np
from pydantic import Field

from hvd_deepreduce.codecs.interfaces import U8, U32, Floats, RngKey, ValueCodec, value_codecs
from hvd_deepreduce.codecs.value.shuffle import from_bytes, open_section, section_of, to_bytes


@value_codecs.register
class Deflate(ValueCodec):
    """The raw bytes of the values, float32 or float64 as they are, in one zlib stream; lossless.

    Mantissas of gradients are close to noise: about 28.5 bits for each kept float32 when shuffled, 30 when not; far
    fewer where values repeat. Slow: some 20 MB/s.

    Section: ``| shuffled u8, 0 or 1 | zlib stream |``.

    Attributes:
        level: 1 (fastest) to 9 (smallest).
        shuffle: put bytes of equal significance together, so that signs and exponents are next to similar bytes.
    """

    name = "deflate"
    id = 8
    level: int = Field(6, ge=1, le=9)
    shuffle: bool = Field(True, strict=True)

    def encode(self, values: Floats, support: U32 | None, key: RngKey) -> tuple[U8, U32 | None]:
        compressed = zlib.compress(to_bytes(values, self.shuffle).data, self.level)
        return section_of(compressed, self.shuffle, values), None

    @staticmethod
    def decode(section: U8, count: int, support: U32 | None, dtype: np.dtype[Any], key: RngKey) -> Floats:
        shuffled, data = open_section(section)
        stream = zlib.decompressobj()
        try:
            # One byte more than expected shows a stream that does not end there; 0 would mean no limit.
            unpacked = stream.decompress(data, count * dtype.itemsize + 1)
        except zlib.error as error:
            raise ValueError(f"the zlib stream is broken: {error}") from None
        if not stream.eof or stream.unused_data:
            raise ValueError("the zlib stream does not end together with its section and its values")
        return from_bytes(unpacked, count, dtype, shuffled, section)
