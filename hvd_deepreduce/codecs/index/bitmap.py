"""Bitmap: one bit for each element of the dense tensor."""

from hvd_deepreduce.codecs.interfaces import LosslessIndexCodec, index_codecs
from hvd_deepreduce.ops import bitmap


@index_codecs.register
class Bitmap(LosslessIndexCodec):
    """Bit i (bit i % 8 of byte i // 8) tells whether element i is kept. 1 / density bits per kept element; lossless.

    The smallest of the simple codecs from a density of about 20% on, where the gaps of ``rice`` have no low bits.
    """

    name = "bitmap"
    id = 3
    section_of, read = staticmethod(bitmap.encode), staticmethod(bitmap.decode)
