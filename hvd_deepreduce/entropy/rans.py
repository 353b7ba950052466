"""rANS: interleaved static asymmetric numeral systems, for the symbols of one stream.

Duda, "Asymmetric numeral systems", arXiv:1311.2540, 2013; Giesen, "Interleaved entropy coders", arXiv:1402.3392, 2014.
"""

from hvd_deepreduce.codec import U8
from hvd_deepreduce.ops import rans


def encode(symbols: U8) -> U8:
    """The section drawn in kernels/rans/rans.cpp; empty for no symbols.

    Within 1% of the entropy for long streams whose symbols have a share of 1/4096 or more. The shares take one to two
    bytes for each symbol that occurs; the states 4 bytes, 16 from 2048 symbols and 128 from 32768 symbols on.
    """
    return rans.encode(symbols)


def decode(section: U8, count: int) -> U8:
    """The ``count`` symbols of ``encode``.

    Raises:
        ValueError: for a section that no encoder wrote.
    """
    return rans.decode(section, count)
