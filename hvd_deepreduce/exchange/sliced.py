"""Buckets of which each rank sums a slice: ``exchange: reduce_scatter``, and ``hierarchical``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Thread
from typing import Any

import numpy as np

from hvd_deepreduce.codecs.interfaces import Floats, RngKey
from hvd_deepreduce.config.error_feedback import DGC
from hvd_deepreduce.engine.buckets import Bucket
from hvd_deepreduce.engine.collectives import Collectives
from hvd_deepreduce.engine.levels import Levels
from hvd_deepreduce.engine.parameter import VELOCITY
from hvd_deepreduce.engine.rank_state import RankState
from hvd_deepreduce.exchange import traffic
from hvd_deepreduce.exchange.balance import AllGather, AllToAll, Inside
from hvd_deepreduce.exchange.reduce_scatter import SlicedSum, Slices
from hvd_deepreduce.exchange.two_levels import Total, TwoLevelSum
from hvd_deepreduce.pipeline.bundle import Slice


class SlicedExchange:
    """A vector's exchange between its start and its result. One thread at a time uses it.

    Args:
        work: this rank's part. Its first collective is started at once.
        collectives: of the ranks that a ``SlicedSum`` has, or the groups of a ``TwoLevelSum``.
        name: begins the names of the collectives; unique among all that are in flight.
        state: of this rank. Its ``stats`` count bytes, and the seconds that the program and its collectives take.
    """

    def __init__(
        self, work: SlicedSum | TwoLevelSum, collectives: Collectives | Levels, name: str, state: RankState
    ) -> None:
        self._groups, self._name, self._state, self._stats = collectives, name, state, state.stats
        self._program: Any = work.steps()
        self._numbers = {False: 0, True: 0}  # ranks of a node may have different numbers of collectives between nodes
        self._asked: AllToAll | AllGather | None = None
        self._inside = False
        self._pending: Any = None
        self._result: Slices | Total | None = None
        self._failure: Exception | None = None
        self._alone = False
        self._go_on(None)

    def advance(self) -> bool:
        """Waits for a collective and starts the next, unless the last one is in flight. Returns whether it did so."""
        if self._asked is None or (isinstance(self._asked, AllGather) and self._asked.last):
            return False
        self._answer()
        return True

    @property
    def _collectives(self) -> Collectives:
        """Of the collective in flight."""
        if isinstance(self._groups, Collectives):
            return self._groups
        group = self._groups.inside if self._inside else self._groups.across
        assert group is not None
        return group

    def result(self) -> Slices | Total:
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
        asked, collectives = self._asked, self._collectives
        with self._stats.span("wait", self._name) as span:
            span.counted = not self._alone  # what a thread of its own waits for keeps nobody waiting
            if isinstance(asked, AllToAll):
                received, sizes = collectives.wait_alltoall(self._pending)
                answer: Any = received, sizes
                wire = traffic.alltoall(collectives.rank(), asked.splits, sizes)
            else:
                assert asked is not None
                answer = collectives.wait_allgather(self._pending)
                wire = traffic.allgather(asked.data.size, answer.size, collectives.size())
        inside = wire if self._inside else traffic.NOTHING
        last = isinstance(asked, AllGather) and asked.last
        with self._stats.span("decode" if last else "encode", self._name) as span:
            self._go_on(answer)
            span.kind = "decode" if self._asked is None else "encode"
        self._stats.add(wire=wire, inside=inside)

    def _go_on(self, answer: Any) -> None:
        self._asked = None  # whatever is raised, nothing is in flight
        try:
            asked = self._program.send(answer)
        except StopIteration as end:
            self._result = end.value
            return
        except Exception as error:
            self._failure = error
            self._state.note_failure(error)
            raise
        self._inside = isinstance(asked, Inside)
        if isinstance(asked, Inside):
            asked = asked.asked
        name = f"{self._name}.{self._numbers[self._inside]}"
        self._numbers[self._inside] += 1
        if isinstance(asked, AllToAll):
            self._pending = self._collectives.start_alltoall(asked.data, asked.splits, name)
        else:
            self._pending = self._collectives.start_allgather(asked.data, name)
        self._asked = asked


def start_slices(state: RankState, bucket: Bucket, residual: Floats | None, velocity: Floats | None) -> SlicedExchange:
    """Starts the exchange of a bucket by ``reduce_scatter``.

    Args:
        residual, velocity: of the bucket. What this rank loses as a slice's owner stays in the residual, also of a rank
            that sends zeros (``RankState.feedback``).
    """
    with state.stats.span("encode", bucket.name):
        work = SlicedSum(
            state.pipeline, state.collectives.size(), bucket.key, bucket.gradient,
            residual=residual if state.feedback else None,
            keeps=residual,
            velocity=velocity,
            parts=bucket.parts if state.config.selection == "tensor" else None,
            finite=bucket.finite,
        )  # fmt: skip
        return SlicedExchange(work, state.collectives, bucket.name, state)


def start_two_levels(state: RankState, groups: Levels, bucket: Bucket, slices: Sequence[Slice]) -> SlicedExchange:
    """Starts the exchange of a bucket over two levels. What fails before is told to all ranks, which would wait.

    Args:
        groups: ``state.levels``.
        slices: what of the bucket has settings of its own.
    """
    with state.stats.span("encode", bucket.name):
        work = _two_levels(state, groups, slices, bucket.gradient)
        try:
            bucket.clear_missing()
            work.gradient = bucket.gradient
            pipelines = [state.pipeline_of(parameter) for parameter in bucket.members]
            if any(map(state.feeds_back, pipelines)):
                work.residual = state.kept_of_slice(bucket, work.part)
            if any(isinstance(one.config.memory, DGC) for one in pipelines):
                work.velocity = state.kept_of_slice(bucket, work.part, VELOCITY)
        except Exception as error:
            work.failures.append(error)
        return SlicedExchange(work, groups, bucket.name, state)


def start_failed(state: RankState, groups: Levels, error: Exception, numel: int) -> SlicedExchange:
    """Takes part in the exchange of a bucket of so many elements, which this rank could not start, over two levels."""
    vector = np.zeros(numel, np.float32)
    whole = Slice(state.pipeline, (0, numel), RngKey(state.config.seed, 0, 0))
    work = _two_levels(state, groups, [whole], vector)
    work.failures.append(error)
    return SlicedExchange(work, groups, "failed", state)


def _two_levels(state: RankState, groups: Levels, slices: Sequence[Slice], gradient: Floats) -> TwoLevelSum:
    """This rank's part in the sum of a vector, so far without a residual."""
    return TwoLevelSum(state.pipeline, groups.place, slices, gradient)
