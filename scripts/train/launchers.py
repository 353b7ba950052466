"""What a training script needs of the job that it runs in: Horovod's, or torch.distributed's."""

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

OF_OPEN_MPI = {"RANK": "RANK", "WORLD_SIZE": "SIZE", "LOCAL_RANK": "LOCAL_RANK", "LOCAL_WORLD_SIZE": "LOCAL_SIZE"}
"""Variables of torchrun, and the ends of the names of mpirun's."""


class HorovodJob:
    """Under mpirun or horovodrun."""

    def __init__(self, **options: Any) -> None:
        import horovod.torch as hvd

        self.hvd = hvd
        hvd.init(**options)
        self.rank, self.size, self.local_size = hvd.rank(), hvd.size(), hvd.local_size()
        self.barrier, self.end = hvd.barrier, hvd.shutdown

    def gather(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """All ranks' tensors, ``[size, ...]``."""
        return self.hvd.allgather(tensor[None], name=name)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of all ranks' tensors."""
        return self.hvd.allreduce(tensor, op=self.hvd.Sum)

    def broadcast(self, model: nn.Module) -> None:
        """Rank 0's parameters become those of all."""
        self.hvd.broadcast_parameters(dict(model.named_parameters()), root_rank=0)

    def distribute(self, model: nn.Module, optimizer: Any, config: Any, seed: int = 0) -> tuple[Any, Any, Any]:
        """The model for the forward pass, the optimizer for the steps, and the compression; None for dense."""
        from hvd_deepreduce.torch import DeepReduce

        compression = None if config == "none" else DeepReduce(model, config, seed=seed)
        optimizer = self.hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), compression or self.hvd.Compression.none
        )
        return model, optimizer, compression

    def distribute_any(self, model: nn.Module, optimizer: Any, config: str, seed: int = 0) -> tuple[Any, Any]:
        """As ``distribute``, from equal parameters; a config with ``local`` goes to LocalSGD, which has ``stats()``."""
        from hvd_deepreduce import Config
        from hvd_deepreduce.torch import LocalSGD

        self.hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        if config == "none" or Config.load(config).local is None:
            return self.distribute(model, optimizer, config, seed)[1:]
        local = LocalSGD(optimizer, model, config, seed=seed)
        return local, local

    def step(self, optimizer: Any, prepare: Callable[[], object] = lambda: None) -> float:
        """Waits for the gradients, calls ``prepare``, and updates the parameters. Returns when the gradients were
        there, in ``perf_counter``'s seconds; LocalSGD's are at once."""
        if not hasattr(optimizer, "skip_synchronize"):
            there = time.perf_counter()
            prepare()
            optimizer.step()
            return there
        optimizer.synchronize()
        there = time.perf_counter()
        prepare()
        with optimizer.skip_synchronize():
            optimizer.step()
        return there


def finish(optimizer: Any) -> None:
    """After the last step: the ranks' parameters become equal, also under LocalSGD."""
    if hasattr(optimizer, "sync"):
        optimizer.sync()


class DdpJob:
    """Under torchrun, or under mpirun with the address and the port of rank 0 in the environment; Gloo, on CPUs."""

    def __init__(self, **_: Any) -> None:
        import torch.distributed as dist

        self._dist = dist
        for name, other in OF_OPEN_MPI.items():
            if (value := os.environ.get(f"OMPI_COMM_WORLD_{other}")) is not None:
                os.environ.setdefault(name, value)
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

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of all ranks' tensors."""
        total = tensor.clone()
        self._dist.all_reduce(total)
        return total

    def broadcast(self, model: nn.Module) -> None:
        """Rank 0's parameters become those of all."""
        for parameter in model.parameters():
            self._dist.broadcast(parameter.data, 0)

    def distribute(self, model: nn.Module, optimizer: Any, config: Any, seed: int = 0) -> tuple[Any, Any, Any]:
        """As that of ``HorovodJob``."""
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


LAUNCHERS: dict[str, Callable[..., HorovodJob | DdpJob]] = {"horovod": HorovodJob, "ddp": DdpJob}
