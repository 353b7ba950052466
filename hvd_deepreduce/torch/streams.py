"""Which of PyTorch's streams a job under Horovod trains on, where Horovod was built with NCCL.

Horovod allocates the results of allgathers and alltoalls on a thread of its own, whose current stream is the GPU's
default stream, and lets NCCL wait for that. So if the backward pass runs on the default stream, NCCL waits for all of
it that is enqueued, and the exchanges come after it. On another stream they go on beside it.
"""

from __future__ import annotations

import logging
import os
from functools import lru_cache

import torch

from hvd_deepreduce.engine import Engine

_log = logging.getLogger("hvd_deepreduce")
_warn_once = lru_cache(_log.warning)
ASYNCHRONOUS = "HOROVOD_ENABLE_ASYNC_COMPLETION"
DEFAULT_STREAM = (
    "the allgathers of DeepReduce come after the backward pass and not beside it, since this job trains on the GPU's "
    "default stream, for which Horovod lets NCCL wait. Write stream = torch.cuda.Stream(); "
    "stream.wait_stream(torch.cuda.current_stream()), and make the hvd.DistributedOptimizer and train inside of "
    "with torch.cuda.stream(stream): (docs/using.md, Streams under Horovod with NCCL)"
)
NOT_WAITED_FOR = (
    f"the environment variable {ASYNCHRONOUS} is set, with which Horovod lets the GPU's default stream alone wait for "
    "its results, and this job trains on another stream: it may read them before they are there. Unset the variable"
)


def look_at_stream(engine: Engine, device: torch.device) -> None:
    """Warns once, on rank 0, if gradients on a GPU come on a stream that is not the best, or on a wrong one.

    Args:
        device: the GPU on which Horovod takes what is sent of a gradient that has just come.
    """
    if not engine.collectives.speaks():
        return
    if torch.cuda.current_stream(device) != torch.cuda.default_stream(device):
        if os.environ.get(ASYNCHRONOUS, "0") not in ("", "0"):
            _warn_once(NOT_WAITED_FOR)
    elif engine.max_bucket_bytes is not None and not engine.exchange.own_thread:  # else nothing can go on beside it
        _warn_once(DEFAULT_STREAM)
