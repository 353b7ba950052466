"""What the adapter of PyTorch calls of Horovod, for a machine with a GPU that has no Horovod (scripts/dev/test_gpu.sh):
collectives of ``torch.distributed``'s store, on the ranks of torchrun.

As Horovod does, it matches collectives by their names, runs them on threads of its own, waits for what was enqueued on
the current stream when a collective was started, and returns what is allocated and written on another stream. Where
the adapters run under Horovod itself, the tests do so too.
"""

from __future__ import annotations

import itertools
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

Average, Sum, Adasum = "average", "sum", "adasum"
nccl = False
"""Whether it says that it was built with NCCL: collectives take tensors on a GPU then."""
_threads = ThreadPoolExecutor(64)
_handles: dict[int, Future[Any]] = {}
_numbers = itertools.count()
_rounds: dict[str, int] = {}


class HorovodInternalError(RuntimeError):
    pass


class Compressor:
    pass


class _ProcessSet:
    process_set_id = 0
    ranks = None

    def size(self) -> int:
        return size()

    def rank(self) -> int:
        return rank()

    def included(self) -> bool:
        return True


global_process_set = _ProcessSet()


def init(*_: Any) -> None:
    pass


def is_initialized() -> bool:
    return True


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


local_rank, local_size = rank, size


def nccl_built() -> bool:
    return nccl


def mpi_enabled() -> bool:
    return False


def _exchanged(key: str, own: bytes) -> list[bytes]:
    """What each rank gives under this key."""
    store = dist.distributed_c10d._get_default_store()
    keys = [f"{key}.{one}" for one in range(size())]
    store.set(keys[rank()], own)
    while not store.check(keys):  # a get that waits would hold back the other threads' calls
        time.sleep(1e-4)
    return list(map(store.get, keys))


def _start(tensor: torch.Tensor, name: str, work: Any) -> int:
    assert nccl or not tensor.is_cuda, "Horovod without NCCL gets a tensor on a GPU"
    event = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None
    _rounds[name] = _rounds.get(name, 0) + 1
    key = f"horovod/{name}/{_rounds[name]}"

    def run() -> Any:
        if event is None:
            return work(key, tensor)
        with torch.cuda.device(tensor.device), torch.cuda.stream(torch.cuda.Stream(tensor.device)):
            torch.cuda.current_stream().wait_event(event)
            done = work(key, tensor)
            torch.cuda.current_stream().synchronize()
            return done

    handle = next(_numbers)
    _handles[handle] = _threads.submit(run)
    return handle


def allreduce_async_(tensor: torch.Tensor, name: str, op: str = Average, process_set: Any = None) -> int:
    def work(key: str, tensor: torch.Tensor) -> torch.Tensor:
        own = tensor.detach().cpu().numpy()
        parts = [np.frombuffer(one, own.dtype).reshape(own.shape) for one in _exchanged(key, own.tobytes())]
        total = sum(parts[1:], parts[0].copy())
        return tensor.copy_(torch.from_numpy(total if op == Sum else total / size()))

    return _start(tensor, name, work)


def allreduce_async(tensor: torch.Tensor, name: str, op: str = Average, process_set: Any = None) -> int:
    return allreduce_async_(tensor.clone(), name, op)


def allgather_async(tensor: torch.Tensor, name: str, process_set: Any = None) -> int:
    def work(key: str, tensor: torch.Tensor) -> torch.Tensor:
        own = tensor.detach().cpu().numpy()
        parts = _exchanged(key, own.tobytes())
        return torch.from_numpy(np.frombuffer(b"".join(parts), own.dtype).copy()).to(tensor.device)

    return _start(tensor, name, work)


def alltoall_async(tensor: torch.Tensor, splits: torch.Tensor, name: str, process_set: Any = None) -> int:
    def work(key: str, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own = tensor.detach().cpu().numpy()
        ends, mine = np.cumsum(splits.tolist()), []
        for to, end in enumerate(ends):
            part = own[end - int(splits[to]) : end].tobytes()
            everyone = _exchanged(f"{key}/{to}", part)
            if to == rank():
                mine = everyone
        counts = [len(one) // own.itemsize for one in mine]
        got = torch.from_numpy(np.frombuffer(b"".join(mine), own.dtype).copy()).to(tensor.device)
        return got, torch.tensor(counts, dtype=torch.int32)

    return _start(tensor, name, work)


def poll(handle: int) -> bool:
    return _handles[handle].done()


def synchronize(handle: int) -> Any:
    return _handles.pop(handle).result()


def install() -> None:
    """Makes it ``horovod.torch`` of this process."""
    here = sys.modules[__name__]
    whole, compression = ModuleType("horovod"), ModuleType("horovod.torch.compression")
    whole.torch, compression.Compressor = here, Compressor  # type: ignore[attr-defined]
    whole.__path__ = []  # type: ignore[attr-defined]
    sys.modules |= {"horovod": whole, "horovod.torch": here, "horovod.torch.compression": compression}
