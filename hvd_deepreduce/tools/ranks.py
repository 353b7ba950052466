"""The ranks of a job that ``advise --measure`` runs in, under mpirun or torchrun."""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_deepreduce.codecs.interfaces import U8


class Ranks(ABC):
    """The collectives of a job's ranks, on the host. All ranks call them at the same time.

    Attributes:
        rank, ranks: the number of this one, and how many there are.
        on_torch: whether they are those of ``torch.distributed``: a rank leaves its core to others while it waits for
            messages, and float16 can be summed. MPI asks for messages all the time.
    """

    rank: int
    ranks: int
    on_torch: bool

    @abstractmethod
    def allgather(self, data: U8) -> U8:
        """All ranks' bytes in rank order, of equally many from each."""

    @abstractmethod
    def allreduce(self, data: npt.NDArray[np.floating[Any]]) -> None:
        """Replaces a vector, float32 or ``on_torch`` float16, by the sum of all ranks'."""

    @abstractmethod
    def slowest(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The element-wise maximum over all ranks of float64 ``[n]``."""

    def close(self) -> None:  # noqa: B027  (mpi4py leaves the job at exit)
        """Leaves the job."""

    def on_this_host(self) -> int:
        """How many ranks have this host's name."""
        name = np.frombuffer(socket.gethostname().encode()[:256].ljust(256, b"\0"), np.uint8).copy()
        return int((self.allgather(name).reshape(self.ranks, name.size) == name).all(1).sum())


class TorchRanks(Ranks):
    """Ranks of ``torch.distributed``, with Gloo.

    Args:
        group: of the ranks; None: all.
    """

    on_torch = True

    def __init__(self, group: Any = None) -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist, self._group = torch, dist, group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def allgather(self, data: U8) -> U8:
        # As DDP's hook sends containers: to each rank by itself.
        sent = self._torch.from_numpy(data).repeat(self.ranks)
        received = self._torch.empty_like(sent)
        self._dist.all_to_all_single(received, sent, group=self._group)
        gathered: U8 = received.numpy()
        return gathered

    def allreduce(self, data: npt.NDArray[np.floating[Any]]) -> None:
        self._dist.all_reduce(self._torch.from_numpy(data), group=self._group)

    def slowest(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        most = values.copy()
        self._dist.all_reduce(self._torch.from_numpy(most), self._dist.ReduceOp.MAX, group=self._group)
        return most

    def close(self) -> None:
        self._dist.destroy_process_group()


class MpiRanks(Ranks):
    """Ranks of MPI."""

    on_torch = False

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi, self._comm = MPI, MPI.COMM_WORLD
        self.rank, self.ranks = self._comm.rank, self._comm.size

    def allgather(self, data: U8) -> U8:
        gathered: U8 = np.empty(self.ranks * data.size, np.uint8)
        self._comm.Allgather(data, gathered)
        return gathered

    def allreduce(self, data: npt.NDArray[np.floating[Any]]) -> None:
        self._comm.Allreduce(self._mpi.IN_PLACE, data)

    def slowest(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        most = values.copy()
        self._comm.Allreduce(self._mpi.IN_PLACE, most, self._mpi.MAX)
        return most


def of_launcher() -> Ranks | None:
    """The ranks of this job; None: this process was started by neither launcher, or is alone."""
    if "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        return TorchRanks()
    if int(os.environ.get("OMPI_COMM_WORLD_SIZE", os.environ.get("PMI_SIZE", 1))) > 1:
        return MpiRanks()
    return None
