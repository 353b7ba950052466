"""The interface of the engine and the exchanges to the communication library."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from hvd_deepreduce.codecs.interfaces import U8, Floats
from hvd_deepreduce.exchange import traffic
from hvd_deepreduce.exchange.traffic import Traffic
from hvd_deepreduce.ops import arrays


class NoSubsetsError(RuntimeError):
    """A job's ranks cannot be divided for two levels."""


class Held:
    """Around the start of several collectives, so that none of them makes a rank wait: ``tell`` and ``launch`` follow.
    Where a library's collectives never wait as they start, there is nothing to hold back.
    """

    def __enter__(self) -> None:
        return

    def __exit__(self, *raised: object) -> None:
        return

    def tell(self, error: Exception | None = None) -> None:
        """Tells all ranks how many bytes follow, or the error that this rank has in their place; waits for none."""

    def launch(self) -> None:
        """Waits for what all ranks have told, and starts the collectives.

        Raises:
            RuntimeError: ranks have told an error; on all ranks.
        """


class Counts(Protocol):
    """Counts what is on the wire."""

    def add(self, *, wire: Traffic) -> None: ...


class Collectives(ABC):
    """Collective operations of the ranks that train one model.

    The engine calls ``start_allgather`` on the thread that starts a gradient and ``wait_allgather`` on the thread that
    finishes it. Ranks may start the same set of allgathers in different orders: they are matched by name. A library
    that matches them by order instead (``torch.distributed``) needs an adapter that starts them in the same order on
    every rank, as DDP does with its buckets. ``exchange: reduce_scatter`` starts a bucket's first collective on the
    thread that starts the bucket, and the others on the thread that receives it.

    Attributes:
        ordered: whether the library matches collectives by their order, and not by name.
        counts: whether the bytes of its exchanges are counted where they are moved, and not by the exchange.
        stats: counts what ``allgather`` sends; set by the engine, which counts the other allgathers itself.
        most_bytes: of all ranks together in an allgather; None: any number.
        instance: the number of these collectives among those of the same ranks, where several may be in use at the same
            time; equal on all ranks. 0: not known yet.
    """

    ordered: bool = False
    counts: bool = False
    stats: Counts | None = None
    most_bytes: int | None = None
    instance: int = 0

    def enroll(self, instance: int = 0) -> None:  # noqa: B027  (only where collectives are matched by name)
        """Takes a number for ``instance`` where it has none: the next one.

        Args:
            instance: that of rank 0 of an elastic job, in place of any other; 0: not known.
        """

    def speaks(self) -> bool:
        """Whether this rank says what all ranks would say alike: rank 0 does. A rank that does not take part, whose
        ``rank`` is an error, does not."""
        return self.rank() == 0

    @abstractmethod
    def rank(self) -> int:
        """This process's rank, 0 to ``size() - 1``."""

    @abstractmethod
    def size(self) -> int:
        """Number of ranks."""

    @abstractmethod
    def local_size(self) -> int:
        """Number of ranks on this machine; they share its cores."""

    @abstractmethod
    def start_allgather(self, data: U8, name: str) -> Any:
        """Starts an allgather and returns at once.

        Args:
            data: uint8 ``[n]``, on the host or a GPU; ``n`` may differ from rank to rank.
            name: the same on all ranks; no two allgathers in flight share one.

        Returns:
            What ``wait_allgather`` takes.
        """

    @abstractmethod
    def wait_allgather(self, pending: Any) -> U8:
        """Waits for an allgather.

        Returns:
            uint8 ``[sum of n]``: all ranks' bytes in rank order, on the host or a GPU.
        """

    def hold(self, most: int) -> Held:
        """Within it, at most ``most`` collectives are started, on all ranks the same; those wait for its ``launch``."""
        return Held()

    def start_alltoall(self, data: U8, splits: Sequence[int], name: str) -> Any:
        """Starts an alltoall and returns at once; for ``exchange: reduce_scatter``.

        Args:
            data: uint8 ``[sum of splits]``, on the host or a GPU: what goes to rank 0, to rank 1, and so on.
            splits: the number of bytes for each rank.
            name: as for ``start_allgather``.

        Returns:
            What ``wait_alltoall`` takes.
        """
        raise NotImplementedError(f"{type(self).__name__} has no alltoall, which exchange 'reduce_scatter' needs")

    def wait_alltoall(self, pending: Any) -> tuple[U8, list[int]]:
        """Waits for an alltoall.

        Returns:
            uint8 ``[n]``, what has come from rank 0, from rank 1, and so on, on the host or a GPU; and the number of
            bytes from each.
        """
        raise NotImplementedError

    def start_sum(self, data: Floats, name: str) -> Any:
        """Starts the sum of a vector over all ranks, and returns at once; by an allgather, where the library's own
        allreduce is not used.

        Args:
            data: float32 or float64 ``[n]``, on the host or a GPU; it may be overwritten.
            name: as for ``start_allgather``.

        Returns:
            What ``wait_sum`` takes.
        """
        return data.dtype, self.start_allgather(arrays.to_host(data).view(np.uint8), name)

    def wait_sum(self, pending: Any) -> Floats:
        """Waits for a sum. Returns it, ``[n]``, on the host or a GPU; it may be what ``start_sum`` was given."""
        dtype, started = pending
        gathered = arrays.to_host(self.wait_allgather(started)).view(dtype)
        total: Floats = gathered.reshape(self.size(), -1).sum(0)
        return total

    def traffic_of_vote(self, size: int) -> Traffic:
        """What a step check of so many bytes costs."""
        return traffic.allreduce(size, self.size())

    def node(self) -> str:
        """The name of the node that this rank is on; for ``hierarchical``."""
        return socket.gethostname()

    def divides(self) -> bool:
        """Whether this rank can make groups of ranks that the job does not have yet."""
        return True

    def subsets(self, groups: Sequence[Sequence[int]], new: bool) -> list[Collectives]:
        """Collectives of those groups of ranks that this rank is in, in the order of ``groups``. All ranks call it at
        the same time, with the same groups.

        Args:
            groups: ranks in rising order, two or more in each.
            new: whether all ranks can make groups (``divides``).

        Raises:
            NoSubsetsError: on all ranks: a group cannot be made.
        """
        raise NoSubsetsError(f"{type(self).__name__} has no groups of some of the ranks")

    def allgather(self, data: U8, name: str) -> U8:
        """Starts an allgather of host bytes and waits for it; called between steps, to compare the ranks."""
        gathered = self._gather(data, name)
        if self.stats is not None:
            self.stats.add(wire=traffic.allgather(data.size, gathered.size, self.size()))
        return gathered

    def _gather(self, data: U8, name: str) -> U8:
        return self.wait_allgather(self.start_allgather(data, name))

    def wait_step_check(self) -> None:  # noqa: B027  (only where step checks are held)
        """Waits until this step's step check (``engine/step_check.py``) has found that all ranks take part.

        ``wait_allgather`` does so for the allgathers; the engine calls this before an exchange over MPI.
        """

    def complete(self) -> None:  # noqa: B027  (only where a rank may leave the others afterwards)
        """Waits until all that this rank has started is complete. Errors are not raised."""

    def elastic(self) -> bool:
        """Whether ranks may come and go while the job runs."""
        return False

    def close(self) -> None:
        """Ends the threads of these collectives, if there are any. It can be called more than once."""
        return

    @abstractmethod
    def mpi_enabled(self) -> bool:
        """Whether the job runs on MPI, so that mpi4py connects these ranks too."""
