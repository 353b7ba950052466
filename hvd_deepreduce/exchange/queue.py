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
        settings: which exchange, and how.
        ranks: those that take part, of the world communicator; None: all. Only these make a queue.

    Raises:
        RuntimeError: MPI was started without support for several threads.
    """

    def __init__(self, settings: Exchange, ranks: Sequence[int] | None = None) -> None:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise RuntimeError(
                f"exchange {settings.name!r} works beside Horovod's own thread, and this MPI was started without "
                "MPI_THREAD_MULTIPLE: use an MPI that has it"
            )
        world = MPI.COMM_WORLD
        self._comm = world if ranks is None else world.Create_group(world.group.Incl(list(ranks)))
        self._settings = settings
        self._worker = ThreadPoolExecutor(1, "deepreduce exchange")

    def submit(self, make: Callable[[], tuple[Tensor, Floats | None]], out: Floats, key: Key) -> Future[int]:
        """Queues one sum, dense, into ``out``; the result is the number of bytes that this rank sent.

        Args:
            make: gives this rank's tensor, and the residual to settle or None; called on the queue's thread.
            out: float32 or float64 ``[numel]``; may be used again once the result is there.
            key: of lossy values' rounding.
        """
        return self._worker.submit(self._sum, make, out, key)

    def _sum(self, make: Callable[[], tuple[Tensor, Floats | None]], out: Floats, key: Key) -> int:
        tensor, residual = make()
        channel = Channel.of(self._comm, TIMEOUT)
        before = channel.sent
        if isinstance(self._settings, DenseStreamExchange):
            settings = self._settings
            codec = DenseStream(coded=settings.coded, value=settings.value, bits=settings.bits)
            densestream.allreduce(
                self._comm, tensor, out=out, residual=residual, fill=settings.fill, codec=codec, key=key
            )
        elif isinstance(self._settings, SparCML):
            sparcml.allreduce(self._comm, tensor, out=out, residual=residual, algorithm=self._settings.algorithm)
        else:
            topk_allgather.allreduce(self._comm, tensor, out=out, residual=residual)
        return channel.sent - before
