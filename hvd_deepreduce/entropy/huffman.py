"""Huffman: a canonical code of up to 12 bits for the symbols of one stream.

Huffman, "A method for the construction of minimum-redundancy codes", Proc. IRE 1952; Larmore and Hirschberg, "A fast
algorithm for optimal length-limited Huffman codes", J. ACM 1990.
"""

from hvd_deepreduce.codec import U8
from hvd_deepreduce.ops import huffman


def encode(symbols: U8) -> U8:
    """The section drawn in kernels/huffman/huffman.cpp; empty for no symbols.

    About p + 0.09 bits a symbol above the entropy at most, p the share of the most frequent symbol, and a bit a symbol
    at least where two or more occur. The code lengths take half a byte a symbol, 192 bytes at most.
    """
    return huffman.encode(symbols)


def decode(section: U8, count: int) -> U8:
    """The ``count`` symbols of ``encode``.

    Raises:
        ValueError: for a section that no encoder wrote.
    """
    return huffman.decode(section, count)
