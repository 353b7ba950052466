"""Which tensors are too small to be compressed. All ranks decide the same, from shapes and config alone."""

from __future__ import annotations

import numpy as np

from hvd_deepreduce.pipeline import Pipeline

LARGE = 1024
"""Elements from which on a tensor is compressed without an estimate."""
CARRIER_BYTES = 8
"""Horovod reduces so many bytes in place of a compressed gradient."""
MESSAGE_BYTES = 64
"""What an allgather of a container costs besides the container: its entry in the ranks' negotiation of each step. Small
gradients, which Horovod reduces together, have that cost in common."""


def uncompressed(pipeline: Pipeline, numel: int, itemsize: int) -> bool:
    """Whether Horovod reduces a tensor as it is, which takes no more bytes than its container would.

    Args:
        pipeline: under the tensor's config.
        numel: its elements; -1: not known before the gradient is there.
        itemsize: bytes of an element as Horovod would send it.
    """
    config = pipeline.config
    if config.scope != "tensor" or numel < 0 or config.memory.has_velocity:
        return False  # the optimizer of such a job gives no momentum to what Horovod reduces
    if config.min_elements is not None:
        return numel < config.min_elements
    if numel >= LARGE:
        return False
    dtype = np.dtype(np.float64 if itemsize == 8 else np.float32)
    return pipeline.estimate(numel, dtype) + CARRIER_BYTES + MESSAGE_BYTES >= numel * itemsize
