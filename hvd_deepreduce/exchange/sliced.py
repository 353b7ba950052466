"""Exchanges of which each rank sums a slice, by several collectives: ``exchange: reduce_scatter``, ``hierarchical``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from threading import Thread
from typing import Any

import numpy as np

from hvd_deepreduce.codecs.interfaces import Floats, RngKey
from hvd_deepreduce.exchange import traffic
from hvd_deepreduce.exchange.balance import AllGather, AllToAll, Inside
from hvd_deepreduce.exchange.collectives import Collectives
from hvd_deepreduce.exchange.interface import Bucket, Exchange, Pending, Rank
from hvd_deepreduce.exchange.levels import Levels
from hvd_deepreduce.exchange.reduce_scatter import CheckedSum, DecodedSum, SlicedSum
from hvd_deepreduce.exchange.two_levels import TwoLevelSum
from hvd_deepreduce.pipeline.bundle import Slice


class RunningProgram(Pending):
    """Runs one rank's program over a job's collectives.

    Args:
        work: the program. Its first collective is started at once.
        groups: the ranks that a ``SlicedSum`` has, or the groups of a ``TwoLevelSum``.
        name: begins the names of the collectives; unique among all that are in flight.
        rank: its ``stats`` count bytes, and the seconds that the program and its collectives take.
        out: gets the sum.
    """

    def __init__(
        self, work: SlicedSum | TwoLevelSum, groups: Collectives | Levels, name: str, rank: Rank, out: Floats
    ) -> None:
        self._groups, self._name, self._rank, self._stats, self._out = groups, name, rank, rank.stats, out
        self._program: Any = work.steps()
        self._numbers = {False: 0, True: 0}  # ranks of a node may have different numbers of collectives between nodes
        self._asked: AllToAll | AllGather | None = None
        self._inside = False
        self._pending: Any = None
        self._total: DecodedSum | CheckedSum | None = None
        self._failure: Exception | None = None
        self._alone = False
        self._go_on(None)

    def advance(self) -> bool:
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

    def result(self, scale: float) -> None:
        total = self._wait()
        with self._stats.span("decode", self._name):
            try:
                total.write(self._out, scale)
            except Exception as error:
                self._rank.note_failure(error)
                raise

    def _wait(self) -> DecodedSum | CheckedSum:
        while self._asked is not None:
            self._answer()
        if self._failure is not None:
            raise self._failure
        assert self._total is not None
        return self._total

    def add_done_callback(self, call: Callable[[Any], object]) -> None:
        """Waits on a thread of its own: no thread that other buckets need waits for a bucket's later collectives, which
        other ranks may begin in another order."""
        if self._asked is None:
            call(self)
            return
        self._alone = True

        def wait() -> None:
            with suppress(Exception):  # ``result`` raises it again
                self._wait()
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
            self._total = end.value
            return
        except Exception as error:
            self._failure = error
            self._rank.note_failure(error)
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


class _Driven(Exchange):
    several = True

    def drive(self, turns: Iterable[Callable[[], bool]]) -> None:
        waiting = list(turns)
        while waiting:
            waiting = [advance for advance in waiting if advance()]


class ReduceScatterExchange(_Driven):
    """Each rank sums a slice of every bucket (``SlicedSum``)."""

    def start(self, rank: Rank, bucket: Bucket) -> Pending:
        residual, velocity = rank.complete(bucket, as_owner=True)
        rank.stats.add(encode=bucket.filling)
        with rank.stats.span("encode", bucket.name):
            work = SlicedSum(
                rank.pipeline, rank.collectives.size(), bucket.key, bucket.gradient,
                residual=residual if rank.feedback else None,
                keeps=residual,
                velocity=velocity,
                parts=bucket.parts if rank.config.selection == "tensor" else None,
                finite=bucket.finite,
                half=bucket.half,
            )  # fmt: skip
            return RunningProgram(work, rank.collectives, bucket.name, rank, bucket.gradient)


class TwoLevelExchange(_Driven):
    """Dense sums inside a node, and a compressed slice of them for each rank between nodes (``TwoLevelSum``).

    Args:
        groups: of this rank; None: the nodes are not known yet, and nothing can be started.
        balances: whether ranks between nodes balance their slices (``reduce_scatter`` with ``density``).
    """

    def __init__(self, groups: Levels | None, balances: bool) -> None:
        self._groups = groups
        self._one_by_one = balances and groups is not None and groups.inside.ordered

    def start(self, rank: Rank, bucket: Bucket) -> Pending:
        """What fails before the first collective is told to all ranks, which would wait."""
        groups = self._groups
        assert groups is not None, "the ranks were not compared"
        rank.stats.add(encode=bucket.filling)
        with rank.stats.span("encode", bucket.name):
            work = TwoLevelSum(rank.pipeline, groups.place, bucket.slices, bucket.gradient)
            try:
                work.residual, work.velocity = rank.complete_slice(bucket, work.part)
                work.gradient = bucket.gradient
            except Exception as error:
                work.failures.append(error)
            return RunningProgram(work, groups, bucket.name, rank, bucket.gradient)

    def start_failed(self, rank: Rank, error: Exception, numel: int) -> Pending | None:
        groups, vector = self._groups, np.zeros(numel, np.float32)
        assert groups is not None, "the ranks were not compared"
        whole = Slice(rank.pipeline, (0, numel), RngKey(rank.config.seed, 0, 0))
        work = TwoLevelSum(rank.pipeline, groups.place, [whole], vector, failures=[error])
        return RunningProgram(work, groups, "failed", rank, vector)

    def drive(self, turns: Iterable[Callable[[], bool]]) -> None:
        """Between nodes, groups of ranks may take different numbers of collectives to balance their slices. Where these
        are matched by their order, a bucket goes on to its end before the next one does: the ranks of a node must come
        to its collectives in one order."""
        turns = list(turns)
        if self._one_by_one:
            for advance in turns:
                while advance():
                    pass
        super().drive(turns)

    def overlap(self, turns: Sequence[Callable[[], bool]]) -> None:
        """The bucket before sends its containers meanwhile."""
        if len(turns) > 1:
            turns[-2]()
