"""The ranks of a job that ``advise --measure`` runs in, under mpirun or torchrun."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hvd_deepreduce.codecs.interfaces import U8

if TYPE_CHECKING:
    from hvd_deepreduce.tools.advise.speeds import Collectives


class TorchRanks:
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
        """As DDP's hook sends containers: to each rank by itself."""
        sent = self._torch.from_numpy(data).repeat(self.ranks)
        received = self._torch.empty_like(sent)
        self._dist.all_to_all_single(received, sent, group=self._group)
        gathered: U8 = received.numpy()
        return gathered

    def allreduce(self, data: npt.NDArray[np.floating[Any]]) -> None:
        """In place."""
        self._dist.all_reduce(self._torch.from_numpy(data), group=self._group)

    def slowest(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The element-wise maximum over all ranks."""
        most = self._torch.from_numpy(values.copy())
        self._dist.all_reduce(most, self._dist.ReduceOp.MAX, group=self._group)
        found: npt.NDArray[np.float64] = most.numpy()
        return found

    def close(self) -> None:
        """Leaves the job; all ranks do so at the same time."""
        self._dist.destroy_process_group()


class MpiRanks:
    """Ranks of MPI."""

    on_torch = False

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi, self._comm = MPI, MPI.COMM_WORLD
        self.rank, self.ranks = self._comm.rank, self._comm.size

    def allgather(self, data: U8) -> U8:
        """Of equally many bytes from each rank."""
        gathered: U8 = np.empty(self.ranks * data.size, np.uint8)
        self._comm.Allgather(data, gathered)
        return gathered

    def allreduce(self, data: npt.NDArray[np.floating[Any]]) -> None:
        """In place."""
        self._comm.Allreduce(self._mpi.IN_PLACE, data)

    def slowest(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The element-wise maximum over all ranks."""
        most = np.empty_like(values)
        self._comm.Allreduce(values, most, self._mpi.MAX)
        return most

    def close(self) -> None:
        """Nothing to do: mpi4py leaves the job at exit."""


def of_launcher() -> TorchRanks | MpiRanks | None:
    """The ranks of this job; None: this process was started by neither launcher, or is alone."""
    if "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        return TorchRanks()
    if int(os.environ.get("OMPI_COMM_WORLD_SIZE", os.environ.get("PMI_SIZE", 1))) > 1:
        return MpiRanks()
    return None


def on_this_host(ranks: Collectives) -> int:
    """How many ranks have this host's name."""
    name = np.zeros(256, np.uint8)
    text = socket.gethostname().encode()[: name.size]
    name[: len(text)] = np.frombuffer(text, np.uint8)
    gathered = np.asarray(ranks.allgather(name)).reshape(ranks.ranks, name.size)
    return int((gathered == name).all(1).sum())
