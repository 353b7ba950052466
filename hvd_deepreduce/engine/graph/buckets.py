"""Buckets of gradients that come and go through operations of a graph.

A framework may have a single thread, so no operation may hold one while it waits. Python has its turn once for each
bucket, on the thread that sends: when all gradients of a bucket are there, it encodes and sends them; when all of its
sums are asked for and all ranks' containers are there, it decodes them, multiplied by what their carriers say, into the
bucket's memory, of which the operations hand out the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from hvd_deepreduce.engine.buckets import Bucket, BucketLayout, Member
from hvd_deepreduce.engine.graph.parameters import GraphEngine
from hvd_deepreduce.engine.graph.runtime import HELD, WANTED, Listener, Runtime
from hvd_deepreduce.engine.graph.slots import Graph, Step, Unit
from hvd_deepreduce.engine.graph.steps import Steps
from hvd_deepreduce.exchange.interface import FailedStart
from hvd_deepreduce.exchange.traffic import allreduces
from hvd_deepreduce.ops import heap

IN_FLIGHT = (
    "buckets of another step are still in flight: either an error ended that step, or two functions that "
    "share a DeepReduce run at the same time. After an error, restart the job from a checkpoint, because "
    "other ranks may wait for these buckets. Use one DeepReduce for each model"
)


@dataclass(eq=False)
class Run:
    """One run of a unit, and what is kept of it for the next.

    Attributes:
        key: of what is kept.
        layout: the unit's buckets.
        places: as in ``Runtime.lay_out``.
        sizes: bytes of each gradient's carrier on the wire, counted as at most 8, and of the gradient.
        number: of the graph's run.
        step: None until the first bucket is full.
        carriers: of the buckets whose sums are asked for: the carrier, and whether it is that of all gradients.
        delivered: how many buckets were.
    """

    key: Any
    layout: BucketLayout
    places: np.ndarray[Any, np.dtype[np.int64]]
    sizes: list[tuple[int, int]]
    number: int = 0
    step: Step | None = None
    carriers: dict[int, tuple[float, bool]] = field(default_factory=dict)
    delivered: int = 0


class GraphBuckets:
    """The buckets of one DeepReduce.

    Args:
        number: gives the DeepReduce's number among those of its process set, for the names of allgathers.
    """

    def __init__(self, engine: GraphEngine, number: Callable[[], int]) -> None:
        self.steps = Steps(engine)
        self._engine = engine
        self._number = number
        # What is kept of runs between steps, under one config and state of the engine. A step that an error ends keeps
        # its own: it may still be in flight.
        self._runs: dict[Any, Run] = {}
        self._generation = engine.generation
        # By the number of their queue, which units of several graphs share: the step under way, the unit begun last.
        self._under_way: dict[int, Step] = {}
        self._begun: dict[int, Unit] = {}
        self._sending = ThreadPoolExecutor(1, "deepreduce send")

    def forget_all(self, graphs: Iterable[Graph]) -> None:
        """Forgets steps that a failure has ended, with the lock of ``steps`` held. Nothing of them may be in flight."""
        self._under_way.clear()
        self._begun.clear()
        self._engine.in_flight.clear()
        for graph in graphs:
            graph.step = None
            for unit in graph.units:
                unit.run = None
                if unit.runtime is not None:
                    unit.runtime.begin(0, len(unit.slots), force=True)

    def close(self) -> None:
        """Ends the thread that sends, after what it has to send, and forgets all layouts."""
        self._sending.shutdown(wait=False)
        self._runs.clear()
        self._begun.clear()

    def runtime(self, unit: Unit, graph: Graph, make: Callable[[Listener], Runtime]) -> Runtime:
        """What runs the operations of a unit; ``make`` makes it."""
        if unit.runtime is None:
            unit.runtime = make(partial(self._told, graph, unit))
        made: Runtime = unit.runtime
        return made

    def begin(self, graph: Graph, number: int, place: bool) -> None:
        """A run of a graph begins: its operations get to know where their gradients go.

        Args:
            number: of the run.
            place: now, where all sizes are known; otherwise once all gradients have come.

        Raises:
            RuntimeError: gradients of an earlier step are in flight; or ``close`` was called.
        """
        with self.steps.lock:
            for unit in graph.units:
                if unit.runtime is None:
                    continue  # it is traced
                self._engine.check_open()
                if unit.dense and unit.waiting:
                    self._note_flushed(unit)
                other = self._begun.get(unit.queue, unit)
                idle = unit.queue not in self._under_way and (other is unit or other.runtime.begin(0, 0))
                if not idle or not unit.runtime.begin(number, len(unit.slots)):
                    raise RuntimeError(IN_FLIGHT)
                self._begun[unit.queue] = unit
                self._put_back(unit)  # of a run whose operations Horovod has not run
                unit.dense = place and self._engine.dense
                unit.waiting = unit.waiting or not unit.dense
                if unit.dense:
                    self._begin_dense(graph, unit, number)
                elif place and unit.known and unit.runtime.early:
                    self._place(graph, unit, number)

    def _begin_dense(self, graph: Graph, unit: Unit, number: int) -> None:
        """A run in which Horovod reduces the gradients. Of compression, it has ended when it begins."""
        self.steps.reach(graph, number)
        step, slots = graph.step, unit.slots
        assert step is not None
        residuals = [self._engine.unsent(self._engine.parameter_of(slot)) for slot in slots] if unit.waiting else []
        unit.waiting = any(one is not None for one in residuals)
        unit.runtime.dense(residuals if unit.waiting else [])
        self._count([(max(0, s.numel) * s.sent_itemsize, max(0, s.numel) * s.itemsize) for s in slots])
        step.begun += len(slots)
        self.steps.leave(step, len(slots))

    def _note_flushed(self, unit: Unit) -> None:
        flushed = zip(unit.slots, unit.runtime.flushed(len(unit.slots)), strict=True)
        self._engine.note_flushed(self._engine.parameter_of(slot) for slot, done in flushed if done)

    def _put_back(self, unit: Unit) -> None:
        run, unit.run = unit.run, None
        if run is not None:
            run.step, run.delivered = None, 0
            run.carriers.clear()
            self._runs[run.key] = run

    def _count(self, sizes: list[tuple[int, int]]) -> None:
        """Counts an allreduce for each of some gradients: bytes of what it reduces, and of the gradient."""
        (wire, dense), ranks = zip(*sizes, strict=True), self._engine.ranks
        self._engine.stats.add(wire=allreduces(wire, ranks), dense=allreduces(dense, ranks).sent)

    def _place(self, graph: Graph, unit: Unit, number: int) -> None:
        """Gives the unit's slots their places, in its buckets."""
        if self._generation != self._engine.generation:
            self._runs.clear()
            self._generation = self._engine.generation
        of, key = unit.key
        if of is not self._engine.list_of(graph):
            key = unit.queue, tuple((self._engine.parameter_of(slot).name, slot.numel) for slot in unit.slots)
            unit.key = (graph.parameters, key) if unit.known else (None, None)
        run = self._runs.pop(key, None) or self._new_run(unit, key)
        run.number, unit.run = number, run
        unit.runtime.lay_out(run.places, run.layout.buckets)

    def _new_run(self, unit: Unit, key: Any) -> Run:
        members = [Member(self._engine.parameter_of(slot), slot.numel) for slot in unit.slots]
        layout = BucketLayout(members, self._engine.max_bucket_bytes, members[0].parameter.number, unit.queue)
        for bucket in layout.buckets:
            # Horovod matches allgathers by name: it must be the same on all ranks, where parameters' names may
            # differ, and unique among all DeepReduces.
            bucket.name = f"bucket.{self._number()}.{unit.queue}.{bucket.number}"
        places = np.empty((3, len(members)), np.int64)
        for at, (parameter, numel, *_) in enumerate(members):
            bucket = layout.bucket_of[parameter.name]
            places[:, at] = bucket.number - layout.first_number, bucket.part_of(parameter.name)[0], numel
        sizes = [(min(slot.itemsize, 8), slot.numel * slot.itemsize) for slot in unit.slots]
        heap.keep_freed()
        return Run(key, layout, places, sizes)

    def _told(self, graph: Graph, unit: Unit, event: int, at: int, number: int, carrier: float, flag: bool) -> None:
        """By a thread of the framework, which does not wait."""
        self._sending.submit(self._hear, graph, unit, event, at, number, carrier, flag)

    def _hear(self, graph: Graph, unit: Unit, event: int, at: int, number: int, carrier: float, flag: bool) -> None:
        try:
            if event == HELD:
                with self.steps.lock:
                    for slot, numel in zip(unit.slots, unit.runtime.sizes(len(unit.slots)), strict=True):
                        slot.numel = numel
                    self._place(graph, unit, number)
                return
            run: Run | None = unit.run
            if run is None or run.number != number:
                return  # the step was forgotten
            bucket = run.layout.buckets[at]
            if event == WANTED:
                run.carriers[at] = carrier, flag
                self._finish_when_there(graph, unit, run, bucket)
            else:
                self._full(graph, unit, run, bucket, at)
        except Exception as error:
            unit.runtime.fail(f"{type(error).__name__}: {error}")

    def _full(self, graph: Graph, unit: Unit, run: Run, bucket: Bucket, at: int) -> None:
        with self.steps.lock:
            if run.step is None:
                self._begin_step(graph, unit, run)
            assert run.step is not None
            self.steps.come(run.step, len(bucket.members))
        unit.runtime.fill(at, bucket, self._engine.takes_pieces(bucket))  # the step says whether residuals are measured
        with self.steps.lock:
            ready = self._engine.mark_full(bucket)
        for one in ready:
            try:
                self._engine.start(one)
            except Exception as error:
                one.pending = FailedStart(error)
        self.steps.rest()
        for one in ready:
            if one.number - run.layout.first_number in run.carriers:
                self._finish_when_there(graph, unit, run, one)

    def _begin_step(self, graph: Graph, unit: Unit, run: Run) -> None:
        self.steps.reach(graph, run.number)
        step = graph.step
        if step is None or self._under_way.setdefault(unit.queue, step) is not step:
            raise RuntimeError(IN_FLIGHT)
        run.step = step
        self._count(run.sizes)

    def _finish_when_there(self, graph: Graph, unit: Unit, run: Run, bucket: Bucket) -> None:
        """Once a bucket's sums are asked for and its exchange was started."""
        if bucket.pending is not None:
            bucket.pending.add_done_callback(partial(self._finish, graph, unit, run, bucket))

    def _finish(self, graph: Graph, unit: Unit, run: Run, bucket: Bucket, _: object) -> None:
        """Decodes a bucket and delivers its sums."""
        step, number, at = run.step, run.number, bucket.number - run.layout.first_number
        assert step is not None
        (carrier, equal), ranks, divisor = run.carriers[at], self._engine.ranks, 0.0
        failure: Exception | None = None
        self.steps.resume(step)
        try:
            if equal:
                self._engine.receive(bucket, carrier / ranks)
            else:
                divisor = float(ranks)
                self._engine.receive(bucket)
        except Exception as error:
            failure = error
        self.steps.rest()
        with self.steps.lock:
            if failure is not None:
                # A framework ends a step at its first error, while other ranks wait for buckets that this rank has
                # not sent. All ranks get the same error, so all can raise it at the end of the step.
                bucket.gradient.fill(0)
                step.failure = step.failure or failure
            self._engine.release_all(bucket)
            run.delivered += 1
            if run.delivered == len(run.layout.buckets):
                del self._under_way[unit.queue]
                self._put_back(unit)
            failure = self.steps.leave(step, len(bucket.members))
        text = None if failure is None else f"{type(failure).__name__}: {failure}"
        unit.runtime.deliver(number, at, bucket, divisor, text)
