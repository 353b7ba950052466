"""What train_torch.py needs of the job that it runs in: Horovod's, or torch.distributed's under torchrun."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class HorovodJob:
    """Under mpirun or horovodrun."""

    def __init__(self) -> None:
        import horovod.torch as hvd

        self._hvd = hvd
        hvd.init()
        self.rank, self.size, self.local_size = hvd.rank(), hvd.size(), hvd.local_size()
        self.barrier, self.end = hvd.barrier, hvd.shutdown

    def gather(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """All ranks' tensors, ``[size, ...]``."""
        gathered: torch.Tensor = self._hvd.allgather(tensor[None], name=name)
        return gathered

    def broadcast(self, model: nn.Module) -> None:
        """Rank 0's parameters become those of all."""
        self._hvd.broadcast_parameters(dict(model.named_parameters()), root_rank=0)

    def distribute(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, config: str, seed: int
    ) -> tuple[Any, Any, Any]:
        """The model for the forward pass, the optimizer for the steps, and the compression; None for dense."""
        from hvd_deepreduce.torch import DeepReduce

        compression = None if config == "none" else DeepReduce(model, config, seed=seed)
        optimizer = self._hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), compression or self._hvd.Compression.none
        )
        return model, optimizer, compression

    def step(self, optimizer: Any) -> float:
        """Waits for the gradients, and updates the parameters. Returns when they were there, in ``perf_counter``'s
        seconds."""
        optimizer.synchronize()
        there = time.perf_counter()
        with optimizer.skip_synchronize():
            optimizer.step()
        return there


class DdpJob:
    """Under torchrun, on CPUs with Gloo."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self._dist = dist
        dist.init_process_group("gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.local_size = int(os.environ["LOCAL_WORLD_SIZE"])
        self.barrier = dist.barrier

    def end(self) -> None:
        """Ends the job."""
        self._dist.barrier()
        self._dist.destroy_process_group()

    def gather(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """All ranks' tensors, ``[size, ...]``."""
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        self._dist.all_gather(gathered, tensor)
        return torch.stack(gathered)

    def broadcast(self, model: nn.Module) -> None:
        """Rank 0's parameters become those of all."""
        for parameter in model.parameters():
            self._dist.broadcast(parameter.data, 0)

    def distribute(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, config: str, seed: int
    ) -> tuple[Any, Any, Any]:
        """The model for the forward pass, the optimizer for the steps, and the compression; None for dense."""
        from hvd_deepreduce.torch import ddp

        # Statistics of batch normalization stay those of their rank, as under Horovod.
        wrapped = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
        if config == "none":
            return wrapped, optimizer, None
        state = ddp.DeepReduceState(config, seed=seed)
        wrapped.register_comm_hook(state, ddp.deepreduce_hook)
        return wrapped, optimizer, state

    def step(self, optimizer: Any) -> float:
        """As under Horovod; the gradients were reduced in the backward pass."""
        there = time.perf_counter()
        optimizer.step()
        return there


LAUNCHERS: dict[str, Callable[[], HorovodJob | DdpJob]] = {"horovod": HorovodJob, "ddp": DdpJob}
