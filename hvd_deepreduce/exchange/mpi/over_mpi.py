"""The exchanges over MPI of a training job, on queues that all ranks make at the same time or not at all."""

from __future__ import annotations

from concurrent.futures import Future
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from hvd_deepreduce.codecs.interfaces import Floats
from hvd_deepreduce.codecs.sparse_tensor import SparseTensor
from hvd_deepreduce.exchange.collectives import Collectives
from hvd_deepreduce.exchange.interface import Bucket, Exchange, FailedStart, Pending, Rank, Started
from hvd_deepreduce.exchange.settings import ExchangeSettings
from hvd_deepreduce.exchange.statements import gather, refusal
from hvd_deepreduce.exchange.traffic import Traffic
from hvd_deepreduce.needs import needed
from hvd_deepreduce.ops import arrays
from hvd_deepreduce.ops.pieces import Pieces
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.wire.quoting import quoted

if TYPE_CHECKING:
    from hvd_deepreduce.exchange.mpi.queue import ExchangeQueue

TAGS = 32768
"""MPI guarantees so many tags."""
_made = count()


class MpiExchange(Exchange):
    """A sum by a function over mpi4py, on the thread of a queue.

    Args:
        settings: name the function.
        queues: of this rank.
    """

    containers = False
    own_thread = True

    def __init__(self, settings: ExchangeSettings, queues: Queues) -> None:
        self._settings, self._queues = settings, queues
        self.on_host = not settings.on_gpu

    def in_one_pass(self, pipeline: Pipeline, dtype: np.dtype[Any]) -> bool:
        return pipeline.selects_elsewhere(dtype)

    def start(self, rank: Rank, bucket: Bucket) -> Pending:
        residual: Floats | None = None
        failure: Exception | None = None
        try:
            residual, _ = rank.complete(bucket)
        except Exception as error:
            failure = error  # the queue tells it to all ranks, which would wait for this one
        pipeline, key = rank.pipeline, bucket.key
        parts = bucket.parts if rank.config.selection == "tensor" else None

        def select() -> tuple[SparseTensor | Floats, Floats | None]:
            if failure is not None:
                raise failure
            keeps, gradient = residual, bucket.gradient if bucket.pieces is None else bucket.pieces
            with rank.stats.span("encode", bucket.name, bucket.filling):
                into = rank.next_residual(bucket, residual)
                selected = pipeline.select(gradient, residual, key, parts, bucket.finite, into=into)
                if into is not None and residual is not None:
                    rank.replace_residual(bucket, residual, into)
                    keeps = into
            if selected is None:  # not finite: sent whole, and the residual is unchanged
                return gradient.joined() if isinstance(gradient, Pieces) else np.array(arrays.to_host(gradient)), None
            indices, values = (None if part is None else arrays.to_host(part) for part in selected)
            assert values is not None
            return values if indices is None else SparseTensor(gradient.size, indices, values), keeps

        try:
            rank.collectives.wait_step_check()
        except Exception as error:
            return FailedStart(error)
        queue = self._queues.queue(bucket.queue, self._settings.name)
        summed = queue.submit(self._settings, select, lambda: bucket.gradient, key, bucket.side_stream())
        return _Queued(rank, bucket, summed, Future.result)

    def prepare(self, queues: int) -> None:
        """
        Raises:
            RuntimeError: as ``Queues.queue``.
        """
        if queues:
            self._queues.queue(queues - 1, self._settings.name)


class _Queued(Started):
    """Its ``result`` raises ``ExchangeError`` or ``LostRankError``, on all ranks."""

    __slots__ = ()

    def _decode(self, received: Traffic, scale: float) -> Traffic:
        if scale != 1.0:
            arrays.scale(self._bucket.gradient, scale)
        return received


class Queues:
    """One rank's queues, made when they are first used. Threads may share it.

    Args:
        collectives: of the ranks that take part.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._queues: list[ExchangeQueue] = []
        self._lock = Lock()

    def queue(self, number: int, exchange: str) -> ExchangeQueue:
        """The queue with this number. The first call with a number must come from all ranks.

        Args:
            exchange: the name of the config's exchange, for errors.

        Raises:
            RuntimeError: on all ranks: the job does not run on MPI, or a rank cannot use mpi4py or MPI's threads.
        """
        with self._lock:
            while len(self._queues) <= number:
                if not self._collectives.mpi_enabled():
                    raise RuntimeError(
                        f"exchange {exchange!r} needs MPI, but this job was started with Gloo: start it with "
                        "horovodrun --mpi or mpirun, or set exchange to 'allgather'"
                    )
                made = self._make(exchange)
                self._queues.append(made)
            return self._queues[number]

    def close(self) -> None:
        """Closes all queues; later calls of ``queue`` make new ones. It can be called more than once.

        To go on after an error of an exchange, every rank does this.
        """
        # Without the lock: ``queue`` holds it while it waits for the other ranks.
        queues, self._queues = self._queues, []
        for queue in queues:
            queue.close()

    def _make(self, exchange: str) -> ExchangeQueue:
        # The communicator must have the ranks of these collectives, in their order, and no others: MPI's world may hold
        # several jobs. And what fails on one rank must be an error on all, or the others would wait for this one.
        said: dict[str, Any] = {"tag": next(_made) % TAGS}
        try:
            # Imported here: it needs mpi4py, which a job with the allgather exchange may not have.
            with needed(f"exchange {exchange!r}", "Or set exchange to 'allgather'"):
                from hvd_deepreduce.exchange.mpi import queue

            said["world"] = queue.world_rank()
        except Exception as error:
            said["error"] = f"{type(error).__name__}: {error}"
        told = self._compare(said, exchange)
        for rank, one in enumerate(told):
            if not (_is_number(one.get("world"), 2**31) and _is_number(one.get("tag"), TAGS)):
                raise refusal(rank, f"sent no numbers in MPI's world, but {quoted(one)}")
        ranks = [one["world"] for one in told]
        if len(set(ranks)) < len(ranks):
            raise RuntimeError(
                f"exchange {exchange!r} cannot start: mpi4py gives the ranks of this job the numbers "
                f"{', '.join(map(str, ranks))} in MPI's world, and each must have a number of its own. Build mpi4py "
                "and Horovod with the same MPI, or set exchange to 'allgather'"
            )
        said = {}
        made = None
        try:
            made = queue.ExchangeQueue(ranks, tag=max(one["tag"] for one in told))
        except Exception as error:
            said["error"] = f"{type(error).__name__}: {error}"
        try:
            self._compare(said, exchange)
        except RuntimeError:
            if made is not None:
                made.close()
            raise
        assert made is not None
        return made

    def _compare(self, said: dict[str, Any], exchange: str) -> list[dict[str, Any]]:
        """What all ranks say, in rank order. ``RuntimeError`` on all of them if one has an error."""
        told = gather(self._collectives, said, "the exchange's ranks")
        errors = [f"rank {rank}: {quoted(one['error'])}" for rank, one in enumerate(told) if "error" in one]
        if errors:
            raise RuntimeError(f"exchange {exchange!r} cannot start: {'; '.join(errors)}")
        return told


def _is_number(value: object, below: int) -> bool:
    return type(value) is int and 0 <= value < below
