"""Sparsifiers: which elements to send. One file each; importing this package registers them all."""

from hvd_deepreduce.sparsify import none, nonzero, randomk, threshold, topk

__all__ = ["none", "nonzero", "randomk", "threshold", "topk"]
