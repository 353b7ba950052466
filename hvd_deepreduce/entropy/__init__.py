"""Entropy coders: streams of uint8 symbols in few bits. What the codecs of indices and values share; one file each."""

from hvd_deepreduce.entropy import huffman, rans

__all__ = ["huffman", "rans"]
