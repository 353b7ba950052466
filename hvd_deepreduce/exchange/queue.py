"""The exchanges of a Horovod job that go over mpi4py: on a thread of their own, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from mpi4py import MPI

from hvd_deepreduce.codec import Floats, Key
from hvd_deepreduce.exchange import densestream, sparcml, topk_allgather
from hvd_deepreduce.exchange.channel import TIMEOUT, Channel
from hvd_deepreduce.exchange.settings import DenseStreamExchange, Exchange, SparCML
from hvd_deepreduce.joint.densestream import DenseStream
from hvd_deepreduce.sparse import SparseTensor

Tensor = SparseTensor | Floats


class ExchangeQueue:
    """Sums tensors over the ranks in the order in which they are given, which must be the same on every rank.

    Args:
        ranks: those that take part, of the world communicator; None: all. Only these make a queue, all at a time.

    Raises:
        RuntimeError: MPI was started without support for several threads.
    """

    def __init__(self, ranks: Sequence[int] | None = None) -> None:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise RuntimeError(
                "an exchange over MPI works beside Horovod's own thread, and this MPI was started without "
                "MPI_THREAD_MULTIPLE: use an MPI that has it, or exchange 'allgather'"
            )
        world = MPI.COMM_WORLD
        group = world.group if ranks is None else world.group.Incl(list(ranks))
        # One of its own: the threads of two queues come to their sums in another order on every rank, and the program
        # may use the world communicator itself.
        self._comm = world.Create_group(group)
        self._channel = Channel.of(self._comm, TIMEOUT)
        self._worker = ThreadPoolExecutor(1, "deepreduce exchange")

    def submit(
        self, settings: Exchange, make: Callable[[], tuple[Tensor, Floats | None]], out: Floats, key: Key
    ) -> Future[int]:
        """Queues one sum, dense, into ``out``; the result is the number of bytes that this rank sent.

        Args:
            settings: which exchange, and how.
            make: gives this rank's tensor, and the residual to settle or None; called on the queue's thread.
            out: float32 or float64 ``[numel]``; may be used again once the result is there.
            key: of lossy values' rounding.
        """
        return self._worker.submit(self._sum, settings, make, out, key)

    def _sum(
        self, settings: Exchange, make: Callable[[], tuple[Tensor, Floats | None]], out: Floats, key: Key
    ) -> int:
        tensor, residual = make()
        before = self._channel.sent
        if isinstance(settings, DenseStreamExchange):
            codec = DenseStream(coded=settings.coded, value=settings.value, bits=settings.bits)
            fill = settings.fill and residual is not None  # no error feedback, or this tensor is not finite
            densestream.allreduce(self._comm, tensor, out=out, residual=residual, fill=fill, codec=codec, key=key)
        elif isinstance(settings, SparCML):
            sparcml.allreduce(self._comm, tensor, out=out, residual=residual, algorithm=settings.algorithm)
        else:
            topk_allgather.allreduce(self._comm, tensor, out=out, residual=residual)
        return self._channel.sent - before
