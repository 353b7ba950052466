"""The exchanges of a training job that go over mpi4py: on a thread of their own, one after the other."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from mpi4py import MPI

from hvd_deepreduce.codec import Floats, RngKey
from hvd_deepreduce.exchange.mpi_transport import PrivateComm, check_intracomm
from hvd_deepreduce.exchange.settings import Exchange, ExchangeFunction
from hvd_deepreduce.exchange.transport import DEFAULT_TIMEOUT
from hvd_deepreduce.sparse import SparseTensor

Tensor = SparseTensor | Floats


class ExchangeQueue:
    """Sums tensors over the ranks, in the order of ``submit``, which must be the same on every rank.

    The queue has a communicator of its own, because the threads of two queues reach their sums in a different order on
    every rank, and because the program may use ``comm`` itself. Making a queue is collective over its ranks.

    Args:
        ranks: the ranks of ``comm`` that take part; None: all. Only these make the queue.
        comm: an mpi4py intracommunicator; None: ``MPI.COMM_WORLD``.

    Raises:
        RuntimeError: MPI was started without MPI_THREAD_MULTIPLE.
        TypeError: ``comm`` is not an intracommunicator.
    """

    def __init__(self, ranks: Sequence[int] | None = None, comm: MPI.Intracomm | None = None) -> None:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise RuntimeError(
                "MPI was started without MPI_THREAD_MULTIPLE, which an exchange over MPI needs because its thread and "
                "Horovod's call MPI at the same time: use an MPI that supports it, or exchange 'allgather'"
            )
        parent = MPI.COMM_WORLD if comm is None else comm
        check_intracomm(parent)
        group = parent.group if ranks is None else parent.group.Incl(list(ranks))
        self._comm = parent.Create_group(group)
        # Made now and by this thread: the threads of two queues would make theirs in a different order on every rank.
        PrivateComm.of(self._comm, DEFAULT_TIMEOUT)
        self._worker = ThreadPoolExecutor(1, "deepreduce exchange")
        self._release = weakref.finalize(self, _release, self._comm, self._worker)
        self._release.atexit = False

    def submit(
        self, settings: Exchange, make: Callable[[], tuple[Tensor, Floats | None]], out: Floats, key: RngKey
    ) -> Future[int]:
        """Queues one dense sum.

        Args:
            settings: which exchange, and its settings. Its function is called on the queue's thread.
            make: returns this rank's tensor, and the residual to subtract what was sent from, or None. Called on the
                queue's thread.
            out: float32 or float64 ``[numel]``, which gets the sum. Not to be used before the future is done.
            key: the randomness for rounding.

        Returns:
            The number of bytes that this rank sent, or the error of ``make`` or of the exchange.

        Raises:
            ValueError, ImportError: the exchange has no function over MPI, or it cannot be loaded (``Exchange.load``).
        """
        return self._worker.submit(self._sum, settings.load(), settings, make, out, key)

    def close(self) -> None:
        """Ends the thread after the exchanges that were submitted, and frees the communicator. It can be called more
        than once."""
        self._worker.shutdown(wait=True)
        self._release()

    def _sum(
        self,
        function: ExchangeFunction[Any],
        settings: Exchange,
        make: Callable[[], tuple[Tensor, Floats | None]],
        out: Floats,
        key: RngKey,
    ) -> int:
        tensor, residual = make()
        return function(settings, self._comm, tensor, out, residual, key)


def _release(comm: MPI.Intracomm, worker: ThreadPoolExecutor) -> None:
    worker.shutdown(wait=False)
    if not MPI.Is_finalized():
        comm.Free()
