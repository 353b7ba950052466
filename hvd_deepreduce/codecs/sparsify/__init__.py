"""Sparsifiers, which select the elements to send. One file each; importing this package registers all of them."""

from hvd_deepreduce.codecs.sparsify import (
    block_topk,
    chunk_topk,
    none,
    nonzero,
    randomk,
    sampled_topk,
    threshold,
    topk,
    topk_capped,
)

__all__ = [
    "block_topk",
    "chunk_topk",
    "none",
    "nonzero",
    "randomk",
    "sampled_topk",
    "threshold",
    "topk",
    "topk_capped",
]
