"""Entropy coders, which write streams of uint8 symbols in few bits, for index and value codecs. One file each."""

from hvd_deepreduce.entropy import huffman, rans

__all__ = ["huffman", "rans"]
