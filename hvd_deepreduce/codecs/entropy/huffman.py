"""Huffman: a canonical code of at most 12 bits for the symbols of a stream.

Huffman, "A method for the construction of minimum-redundancy codes", Proc. IRE 1952; Larmore and Hirschberg, "A fast
algorithm for optimal length-limited Huffman codes", J. ACM 1990.
"""

from hvd_deepreduce.codecs.interfaces import U8
from hvd_deepreduce.ops import huffman


def encode(symbols: U8) -> U8:
    """The section of the symbols, empty for none. kernels/huffman/huffman.cpp draws it.

    With p for the share of the most frequent symbol, it takes at most about p + 0.09 bits per symbol more than the
    entropy, and at least a bit per symbol if two or more symbols occur. The code lengths take half a byte for each
    symbol that occurs, at most 192 bytes.
    """
    return huffman.encode(symbols)


def decode(section: U8, count: int) -> U8:
    """The ``count`` symbols of a section.

    Raises:
        ValueError: an encoder cannot have written the section for ``count`` symbols.
    """
    return huffman.decode(section, count)
