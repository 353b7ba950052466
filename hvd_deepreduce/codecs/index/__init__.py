"""Index codecs, which write the support in few bits. One file each; importing this package registers all of them."""

from hvd_deepreduce.codecs.index import (
    auto,
    bitmap,
    bloom,
    context,
    delta,
    elias_fano,
    huffman,
    packed,
    rans,
    raw,
    rice,
    rice_blocks,
    rle,
)

__all__ = [
    "auto",
    "bitmap",
    "bloom",
    "context",
    "delta",
    "elias_fano",
    "huffman",
    "packed",
    "rans",
    "raw",
    "rice",
    "rice_blocks",
    "rle",
]
