"""Buckets of gradients that come and go through the operations in C++.

Python has its turn once for each bucket, on the thread that sends: when all gradients of a bucket are there, it encodes
and sends them; when all of its sums are asked for and all ranks' containers are there, it decodes them, multiplied by
what their carriers say, into the bucket's memory. The operations hand out views of that memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from hvd_deepreduce.engine import Bucket, BucketLayout, Engine
from hvd_deepreduce.exchange.traffic import Traffic, allreduce
from hvd_deepreduce.tensorflow.buckets import IN_FLIGHT, GraphBuckets
from hvd_deepreduce.tensorflow.graph import Graph, Step, Unit
from hvd_deepreduce.tensorflow.native import HELD, WANTED, Library, Memory, NativeUnit
from hvd_deepreduce.tensorflow.parameters import GraphParameters


@dataclass(eq=False)
class Run:
    """One run of a unit, and what is kept of it for the next.

    Attributes:
        key: of what is kept.
        layout: the unit's buckets.
        places: as in ``NativeUnit.lay_out``.
        memories: of the buckets.
        number: of the graph's run.
        step: None until the first bucket is full.
        carriers: of the buckets whose sums are asked for: the carrier, and whether it is that of all gradients.
        failures: of buckets that could not be sent.
        delivered: how many buckets were.
        traffic: the number of ranks, what the carriers of a step are on the wire, and the bytes of a dense step.
    """

    key: Any
    layout: BucketLayout
    places: np.ndarray[Any, np.dtype[np.int64]]
    memories: list[Memory]
    number: int = 0
    step: Step | None = None
    carriers: dict[int, tuple[float, bool]] = field(default_factory=dict)
    failures: dict[int, Exception] = field(default_factory=dict)
    delivered: int = 0
    traffic: tuple[int, Traffic, int] | None = None


class NativeBuckets(GraphBuckets):
    """The buckets of one DeepReduce, for both kinds of operations."""

    def __init__(self, engine: Engine, parameters: GraphParameters, number: Callable[[], int]) -> None:
        super().__init__(engine, parameters, number)
        self._runs: dict[Any, Run] = {}
        # The unit that has begun last, by its queue's number: units of several graphs share these.
        self._begun: dict[int, Unit] = {}

    def clear(self) -> None:
        """Forgets all layouts, after the config or the state has changed."""
        super().clear()
        self._runs.clear()

    def close(self) -> None:
        """Ends the thread that sends, after what it has to send, and forgets all layouts."""
        super().close()
        self._begun.clear()

    def forget(self, graph: Graph) -> None:
        """Forgets the graph's step."""
        super().forget(graph)
        self._begun.clear()
        for unit in graph.units:
            unit.run = None
            if unit.native is not None:
                unit.native.begin(0, len(unit.slots), force=True)

    def native(self, library: Library, unit: Unit, graph: Graph) -> NativeUnit:
        """The unit, for operations in C++."""
        if unit.native is None:
            unit.native = NativeUnit(library, partial(self._told, graph, unit))
        made: NativeUnit = unit.native
        return made

    def begin(self, graph: Graph, number: int, place: bool) -> None:
        """A run of a graph begins: its operations in C++ get to know where their gradients go.

        Args:
            number: of the run.
            place: now, where all sizes are known; otherwise once all gradients have come.

        Raises:
            RuntimeError: gradients of an earlier step are in flight; or ``close`` was called.
        """
        with self.steps.lock:
            for unit in graph.units:
                if unit.native is None:
                    continue
                self._engine.check_open()
                if unit.dense and unit.waiting:
                    self._note_flushed(unit)
                other = self._begun.get(unit.queue, unit)
                idle = unit.queue not in self._under_way and (other is unit or other.native.begin(0, 0))
                if not idle or not unit.native.begin(number, len(unit.slots)):
                    raise RuntimeError(IN_FLIGHT)
                self._begun[unit.queue] = unit
                self._put_back(unit)  # of a run whose operations Horovod has not run
                unit.dense = place and self._engine.dense
                unit.waiting = unit.waiting or not unit.dense
                if unit.dense:
                    self._begin_dense(graph, unit, number)
                elif place and unit.known:
                    self._place(graph, unit, number)

    def _begin_dense(self, graph: Graph, unit: Unit, number: int) -> None:
        """A run in which Horovod reduces the gradients. Of compression, it has ended when it begins."""
        self.steps.reach(graph, number)
        step, slots = graph.step, unit.slots
        assert step is not None
        residuals = [self._engine.unsent(self._parameters.of(slot)) for slot in slots] if unit.waiting else []
        unit.waiting = any(one is not None for one in residuals)
        unit.native.dense(residuals if unit.waiting else [])
        ranks = self._engine.collectives.size()
        if unit.dense_traffic is None or unit.dense_traffic[0] != ranks or unit.waiting:
            sent = [allreduce(max(0, slot.numel) * slot.sent_itemsize, ranks) for slot in slots]
            wire = Traffic(sum(one.sent for one in sent), sum(one.received for one in sent))
            unit.dense_traffic = ranks, wire, _traffic(unit, ranks)[1]
        _, wire, dense = unit.dense_traffic
        self._engine.stats.add(wire=wire, dense=dense)
        self.steps.come(step, len(slots))
        self.steps.leave(step, len(slots))

    def _note_flushed(self, unit: Unit) -> None:
        flushed = zip(unit.slots, unit.native.flushed(len(unit.slots)), strict=True)
        self._engine.note_flushed(self._parameters.of(slot) for slot, done in flushed if done)

    def _put_back(self, unit: Unit) -> None:
        run, unit.run = unit.run, None
        if run is not None:
            run.step, run.delivered = None, 0
            run.carriers.clear()
            run.failures.clear()
            self._runs[run.key] = run

    def _place(self, graph: Graph, unit: Unit, number: int) -> None:
        """Gives the unit's slots their places, in buckets that no result of an earlier step is a view of."""
        members = self._members(unit)
        key = (unit.queue, tuple((member.parameter.name, member.numel) for member in members))
        run = self._runs.pop(key, None)
        if run is None:
            layout = self._new_layout(members, unit)
            index = {bucket.number: at for at, bucket in enumerate(layout.buckets)}
            places = np.empty((3, len(members)), np.int64)
            for at, (parameter, numel, _) in enumerate(members):
                bucket = layout.bucket_of[parameter.name]
                places[:, at] = index[bucket.number], bucket.part_of(parameter.name)[0], numel
            run = Run(key, layout, places, [])
        library = unit.native.library
        for at, bucket in enumerate(run.layout.buckets):
            if at == len(run.memories):
                run.memories.append(Memory(library, sum(bucket.sizes), bucket.dtype))
            elif not run.memories[at].alone():
                run.memories[at] = Memory(library, sum(bucket.sizes), bucket.dtype)
            else:
                continue
            bucket.gradient = run.memories[at].array()
        run.number, unit.run = number, run
        unit.native.lay_out(run.places, run.memories)

    def _told(self, graph: Graph, unit: Unit, event: int, at: int, number: int, carrier: float, flag: bool) -> None:
        """By a thread of TensorFlow, which does not wait."""
        self._sending.submit(self._hear, graph, unit, event, at, number, carrier, flag)

    def _hear(self, graph: Graph, unit: Unit, event: int, at: int, number: int, carrier: float, flag: bool) -> None:
        try:
            if event == HELD:
                with self.steps.lock:
                    for slot, numel in zip(unit.slots, unit.native.sizes(len(unit.slots)), strict=True):
                        slot.numel = numel
                    self._place(graph, unit, number)
                return
            run: Run | None = unit.run
            if run is None or run.number != number:
                return  # the step was forgotten
            if event == WANTED:
                run.carriers[at] = carrier, flag
                self._finish_when_there(graph, unit, run, at)
            else:
                self._full(graph, unit, run, at, flag)
        except Exception as error:
            unit.native.fail(f"{type(error).__name__}: {error}")

    def _full(self, graph: Graph, unit: Unit, run: Run, at: int, finite: bool) -> None:
        bucket = run.layout.buckets[at]
        bucket.finite = finite
        with self.steps.lock:
            if run.step is None:
                self._begin_step(graph, unit, run)
            assert run.step is not None
            self.steps.come(run.step, len(bucket.members))
            ready = self._engine.mark_full(bucket)
        for one in ready:
            index = run.layout.buckets.index(one)
            try:
                with self.steps.working(run.step, ""):
                    self._engine.start(one)
            except Exception as error:
                run.failures[index] = error
            if index in run.carriers:
                self._finish_when_there(graph, unit, run, index)

    def _begin_step(self, graph: Graph, unit: Unit, run: Run) -> None:
        self.steps.reach(graph, run.number)
        step = graph.step
        if step is None or self._under_way.setdefault(unit.queue, step) is not step:
            raise RuntimeError(IN_FLIGHT)
        run.step = step
        ranks = self._engine.collectives.size()
        if run.traffic is None or run.traffic[0] != ranks:
            run.traffic = ranks, *_traffic(unit, ranks)
        _, wire, dense = run.traffic
        self._engine.stats.add(wire=wire, dense=dense)

    def _finish_when_there(self, graph: Graph, unit: Unit, run: Run, at: int) -> None:
        """Once a bucket's sums are asked for and its exchange was started."""
        bucket, failure = run.layout.buckets[at], run.failures.get(at)
        if failure is not None:
            self._finish(graph, unit, run, at, bucket, failure)
        elif bucket.pending is not None:
            bucket.pending.add_done_callback(lambda _: self._finish(graph, unit, run, at, bucket))

    def _finish(
        self, graph: Graph, unit: Unit, run: Run, at: int, bucket: Bucket, failure: Exception | None = None
    ) -> None:
        """Decodes a bucket and delivers its sums."""
        step, number = run.step, run.number
        assert step is not None
        (carrier, equal), ranks, divisor = run.carriers[at], self._engine.collectives.size(), 0.0
        with self.steps.working(step, ""):
            try:
                if failure is None:
                    if equal and not self._engine.over_mpi:
                        self._engine.receive(bucket, carrier / ranks)
                    else:
                        divisor = float(ranks)
                        self._engine.receive(bucket)
            except Exception as error:
                failure = error
        with self.steps.lock:
            if failure is not None:
                # As in ``GraphBuckets``: all ranks raise it at the end of the step.
                bucket.gradient.fill(0)
                step.failure = step.failure or failure
            self._engine.release_all(bucket)
            run.delivered += 1
            if run.delivered == len(run.layout.buckets):
                del self._under_way[unit.queue]
                self._put_back(unit)
            failure = self.steps.leave(step, len(bucket.members))
        unit.native.deliver(number, at, divisor, None if failure is None else f"{type(failure).__name__}: {failure}")


def _traffic(unit: Unit, ranks: int) -> tuple[Traffic, int]:
    carriers = [allreduce(slot.carrier_bytes, ranks) for slot in unit.slots]
    wire = Traffic(sum(one.sent for one in carriers), sum(one.received for one in carriers))
    return wire, sum(allreduce(slot.numel * slot.dtype.size, ranks).sent for slot in unit.slots)
