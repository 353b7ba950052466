"""Deflate: the values' bytes through zlib. RFC 1950 and 1951; DR with Deflate in DeepReduce, section 4 and table 3."""

import zlib

from pydantic import Field

from hvd_deepreduce.codecs.interfaces import U8, value_codecs
from hvd_deepreduce.codecs.value.shuffle import BytesCodec


@value_codecs.register
class Deflate(BytesCodec):
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

    def compressed(self, runs: U8) -> bytes:
        return zlib.compress(runs.data, self.level)

    @staticmethod
    def unpacked(data: bytes, size: int) -> bytes:
        stream = zlib.decompressobj()
        try:
            # One byte more than expected shows a stream that does not end there; 0 would mean no limit.
            unpacked = stream.decompress(data, size + 1)
        except zlib.error as error:
            raise ValueError(f"the zlib stream is broken: {error}") from None
        if not stream.eof or stream.unused_data:
            raise ValueError("the zlib stream does not end together with its section and its values")
        return unpacked
