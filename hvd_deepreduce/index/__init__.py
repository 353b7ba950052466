"""Index codecs, which write the support in few bits. One file each; importing this package registers all of them."""

from hvd_deepreduce.index import auto, bitmap, bloom, delta, elias_fano, huffman, packed, rans, raw, rice, rle

__all__ = ["auto", "bitmap", "bloom", "delta", "elias_fano", "huffman", "packed", "rans", "raw", "rice", "rle"]
