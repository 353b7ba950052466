"""Bitmap: one bit for each element of the dense tensor."""

from hvd_deepreduce.codecs.interfaces import U8, U32, IndexCodec, RngKey, index_codecs
from hvd_deepreduce.ops import bitmap


@index_codecs.register
class Bitmap(IndexCodec):
    """Bit i (bit i % 8 of byte i // 8) tells whether element i is kept. 1 / density bits per kept element; lossless.

    The smallest of the simple codecs from a density of about 20% on, where the gaps of ``rice`` have no low bits.
    """

    name = "bitmap"
    id = 3

    def encode(self, indices: U32, numel: int, key: RngKey) -> tuple[U8, U32]:
        return bitmap.encode(indices, numel), indices

    @staticmethod
    def decode(section: U8, numel: int, count: int, key: RngKey) -> U32:
        return bitmap.decode(section, numel, count)
