"""Sparsifiers: which elements to send. One file each; importing this package registers them all."""

from hvd_deepreduce.sparsify import block_topk, none, nonzero, randomk, sampled_topk, threshold, topk, topk_capped

__all__ = ["block_topk", "none", "nonzero", "randomk", "sampled_topk", "threshold", "topk", "topk_capped"]
