"""The queues of an engine's exchanges over MPI, which all ranks make at the same time or not at all."""

from __future__ import annotations

import json
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from hvd_deepreduce.engine.agreement import read, refusal
from hvd_deepreduce.engine.collectives import Collectives
from hvd_deepreduce.engine.quoting import quoted
from hvd_deepreduce.needs import needed

if TYPE_CHECKING:
    from hvd_deepreduce.exchange.mpi.queue import ExchangeQueue

TAGS = 32768
"""MPI guarantees so many tags."""
_made = count()


class Exchanges:
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
        line = bytearray(json.dumps({**said, "rank": self._collectives.rank()}).encode() + b"\n")
        gathered = self._collectives.allgather(np.frombuffer(line, np.uint8), "the exchange's ranks")
        told = read(gathered.tobytes(), self._collectives.size())
        errors = [f"rank {rank}: {quoted(one['error'])}" for rank, one in enumerate(told) if "error" in one]
        if errors:
            raise RuntimeError(f"exchange {exchange!r} cannot start: {'; '.join(errors)}")
        return told


def _is_number(value: object, below: int) -> bool:
    return type(value) is int and 0 <= value < below
