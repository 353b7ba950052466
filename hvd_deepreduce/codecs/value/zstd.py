"""Zstd: the values' bytes through Zstandard. RFC 8878."""

import zstandard
from pydantic import Field

from hvd_deepreduce.codecs.interfaces import U8, value_codecs
from hvd_deepreduce.codecs.value.shuffle import BytesCodec


@value_codecs.register
class Zstd(BytesCodec):
    """The raw bytes of the values, float32 or float64 as they are, in one Zstandard frame; lossless.

    Mantissas of gradients are close to noise: about 27.5 bits for each kept float32 when shuffled, 30 when not; far
    fewer where values repeat. Some twenty times faster than ``deflate``. A higher level pays only where values repeat.

    Section: ``| shuffled u8, 0 or 1 | frame with its content size |``.

    Attributes:
        level: 1 (fastest) to 22 (smallest).
        shuffle: put bytes of equal significance together, so that signs and exponents are next to similar bytes.
    """

    name = "zstd"
    id = 9
    level: int = Field(1, ge=1, le=22)

    def compressed(self, runs: U8) -> bytes:
        frame = zstandard.ZstdCompressor(level=self.level).compressobj(size=sum(run.size for run in runs))
        parts = []
        # A block has one table for its literals, so bytes of each significance get their own block.
        for run in runs:
            parts += [frame.compress(run.data), frame.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
        return b"".join([*parts, frame.flush()])

    @staticmethod
    def unpacked(data: bytes, size: int) -> bytes:
        try:
            # The library allocates the size that the frame states, so that is checked first.
            stated = zstandard.frame_content_size(data)
            if stated != size:
                raise ValueError(f"its values are {size} bytes; the frame holds {stated}")
            return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise ValueError(f"the Zstandard frame is broken: {error}") from None
