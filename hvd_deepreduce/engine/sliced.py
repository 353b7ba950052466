"""Runs the program of ``exchange: reduce_scatter`` over a job's collectives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from time import perf_counter
from typing import Any

from hvd_deepreduce.engine.collectives import Collectives
from hvd_deepreduce.engine.stats import Stats
from hvd_deepreduce.exchange import traffic
from hvd_deepreduce.exchange.balance import AllGather, AllToAll
from hvd_deepreduce.exchange.reduce_scatter import SlicedSum, Slices


class SlicedExchange:
    """A vector's exchange between its start and its result. One thread at a time uses it.

    Args:
        work: this rank's part. Its first collective is started at once.
        collectives: of the ranks.
        name: begins the names of the collectives; unique among all that are in flight.
        stats: counts bytes, and the seconds that the program and its collectives take.
    """

    def __init__(self, work: SlicedSum, collectives: Collectives, name: str, stats: Stats) -> None:
        self._collectives, self._name, self._stats = collectives, name, stats
        self._program = work.steps()
        self._number = 0
        self._asked: AllToAll | AllGather | None = None
        self._pending: Any = None
        self._result: Slices | None = None
        self._failure: Exception | None = None
        self._alone = False
        self._go_on(None)

    def advance(self) -> None:
        """Waits for all collectives but the last, which is in flight then."""
        while self._asked is not None and not (isinstance(self._asked, AllGather) and self._asked.last):
            self._answer()

    def result(self) -> Slices:
        """Waits for the sum.

        Raises:
            ContainerError: as ``SlicedSum.steps``; at every call.
        """
        while self._asked is not None:
            self._answer()
        if self._failure is not None:
            raise self._failure
        assert self._result is not None
        return self._result

    def add_done_callback(self, call: Callable[[Any], object]) -> None:
        """Waits on a thread of its own, and calls ``call`` there once ``result`` need not wait. So no thread that other
        buckets need waits for a bucket's later collectives, which other ranks may begin in another order."""
        if self._asked is None:
            call(self)
            return
        self._alone = True

        def wait() -> None:
            with suppress(Exception):  # ``result`` raises it again
                self.result()
            call(self)

        Thread(target=wait, name="deepreduce slices", daemon=True).start()

    def _answer(self) -> None:
        """Waits for the collective in flight, and starts the next."""
        asked, ranks = self._asked, self._collectives.size()
        begin = perf_counter()
        if isinstance(asked, AllToAll):
            received, sizes = self._collectives.wait_alltoall(self._pending)
            answer: Any = received, sizes
            wire = traffic.alltoall(self._collectives.rank(), asked.splits, sizes)
        else:
            assert asked is not None
            answer = self._collectives.wait_allgather(self._pending)
            wire = traffic.allgather(asked.data.size, answer.size, ranks)
        there = perf_counter()
        self._go_on(answer)
        ran = perf_counter() - there
        encode, decode = (0.0, ran) if self._asked is None else (ran, 0.0)
        # What a thread of its own waits for keeps nobody waiting.
        self._stats.add(wire=wire, wait=0.0 if self._alone else there - begin, encode=encode, decode=decode)

    def _go_on(self, answer: Any) -> None:
        self._asked = None  # whatever is raised, nothing is in flight
        try:
            asked = self._program.send(answer)
        except StopIteration as end:
            self._result = end.value
            return
        except Exception as error:
            self._failure = error
            raise
        name = f"{self._name}.{self._number}"
        self._number += 1
        if isinstance(asked, AllToAll):
            self._pending = self._collectives.start_alltoall(asked.data, asked.splits, name)
        else:
            self._pending = self._collectives.start_allgather(asked.data, name)
        self._asked = asked
