"""The engine's collectives over Horovod, on PyTorch's tensors."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch

from hvd_deepreduce.codec import U8
from hvd_deepreduce.horovod import HorovodCollectives
from hvd_deepreduce.torch.tensors import TorchTensors


class TorchCollectives(HorovodCollectives):
    """Allgathers of ``horovod.torch``, on the GPU where Horovod was built with NCCL.

    Args:
        tensors: converts arrays to tensors and back.
        process_set: of the ranks that take part; None: all.
    """

    def __init__(self, tensors: TorchTensors, process_set: Any = None) -> None:
        super().__init__(hvd, hvd.global_process_set if process_set is None else process_set)
        self._tensors = tensors

    def start_allgather(self, data: U8, name: str) -> Any:
        """Starts Horovod's asynchronous allgather; returns its handle."""
        tensor = self._tensors.tensor(data)
        return hvd.allgather_async(tensor.to(wire_device(tensor)), f"deepreduce.{name}", self.process_set)

    def wait_allgather(self, pending: Any) -> U8:
        """Waits for the handle."""
        gathered = hvd.synchronize(pending)
        if gathered.is_cuda:  # Horovod allocates it on a stream of its own
            gathered.record_stream(torch.cuda.current_stream(gathered.device))
        array: U8 = self._tensors.array(gathered)
        return array


def wire_device(tensor: torch.Tensor) -> torch.device:
    """Where Horovod takes what is sent of a tensor: its GPU if Horovod was built with NCCL, else the host."""
    return tensor.device if not tensor.is_cuda or hvd.nccl_built() else torch.device("cpu")
