"""rANS: interleaved static asymmetric numeral systems, for the symbols of a stream.

Duda, "Asymmetric numeral systems", arXiv:1311.2540, 2013; Giesen, "Interleaved entropy coders", arXiv:1402.3392, 2014.
"""

from hvd_deepreduce.codecs.interfaces import U8
from hvd_deepreduce.ops import rans


def encode(symbols: U8) -> U8:
    """The section of the symbols, empty for none. kernels/rans/rans.cpp draws it.

    Within 1% of the entropy for long streams in which each symbol has a share of at least 1/4096. The shares take one
    to two bytes for each symbol that occurs. The states take 4 bytes, 16 from 2048 symbols on, and 128 from 32,768 on.
    """
    return rans.encode(symbols)


def decode(section: U8, count: int) -> U8:
    """The ``count`` symbols of a section.

    Raises:
        ValueError: an encoder cannot have written the section for ``count`` symbols.
    """
    return rans.decode(section, count)
