"""Entropy coders, which write streams of uint8 symbols in few bits, for index and value codecs. One file each."""

from hvd_deepreduce.codecs.entropy import huffman, rans

__all__ = ["CODERS", "ENTROPY_IDS", "huffman", "rans"]

CODERS = {1: huffman, 2: rans}
"""The coders by their numbers in sections; 0 stands for none."""
ENTROPY_IDS = {"huffman": 1, "rans": 2}
"""Their numbers, by name."""
