"""When a step of a graph begins and ends, and the time that is spent waiting in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from threading import RLock
from time import perf_counter
from typing import Literal

from hvd_deepreduce.engine.graph.parameters import GraphEngine
from hvd_deepreduce.engine.graph.slots import AGAIN, Graph, Slot, Step
from hvd_deepreduce.engine.parameter import Parameter

_STEP = attrgetter("step")


class Steps:
    """The steps of one DeepReduce's graphs. A framework runs several operations of a step at the same time.

    Attributes:
        lock: of everything that operations of a step share.
    """

    def __init__(self, engine: GraphEngine) -> None:
        self.lock = RLock()
        self._engine = engine
        self._working = 0
        self._idle_since = 0.0

    def reach(self, graph: Graph, number: int) -> None:
        """Something of the graph's run with this number has come; with the first its step begins."""
        with self.lock:
            if graph.reached < number:
                graph.reached = number
                self._engine.stats.begin_step()
                if graph.uncompressed_bytes[0]:
                    self._engine.count_allreduce(*graph.uncompressed_bytes)
                if graph.compressed:
                    graph.step = Step(graph, number)
                else:
                    self._engine.stats.end_step()

    def count(self, graph: Graph) -> int:
        """How often gradients of the graph's parameters were compressed.

        Raises:
            ValueError: a state was loaded, and it is of another model.
        """
        with self.lock:
            return max(map(_STEP, self._engine.list_of(graph)), default=0)

    def find(self, slot: Slot, number: int) -> tuple[Step, Parameter]:
        """The run of the slot's graph with this number, which may begin now, and the slot's parameter."""
        with self.lock:
            self.reach(slot.graph, number)
            step = slot.graph.step
            if step is None or step.number != number:
                raise RuntimeError(AGAIN)
            return step, self._engine.parameter_of(slot)

    def come(self, step: Step, gradients: int) -> None:
        """So many gradients of the step have come, and work on them begins."""
        with self.lock:
            step.begun += gradients
            self._working += 1

    def resume(self, step: Step) -> None:
        """Work on a step goes on. Since the end of other work this rank has waited, if all gradients had come."""
        with self.lock:
            if not self._working and step.begun == step.graph.compressed:
                now, stats = perf_counter(), self._engine.stats
                stats.add(wait=now - self._idle_since)
                if stats.watch is not None:
                    stats.watch.add("wait", "all", self._idle_since, now)
            self._working += 1

    def rest(self) -> None:
        """The end of work that ``come`` or ``resume`` began."""
        with self.lock:
            self._working -= 1
            self._idle_since = perf_counter()

    def end(self, step: Step, parameter: Parameter) -> None:
        """A gradient has been reduced; with the last one the step ends.

        Raises:
            Exception: the step's failure, at its end.
        """
        with self.lock:
            self._engine.in_flight.discard(parameter.name)
            failure = self.leave(step, 1)
        if failure is not None:
            raise failure

    def leave(self, step: Step, gradients: int) -> Exception | None:
        """So many gradients have been reduced; with the last one the step ends.

        Returns:
            The step's failure, at its end.
        """
        with self.lock:
            step.ended += gradients
            if step.ended < step.graph.compressed:
                return None
            step.graph.step = None
            self._engine.stats.end_step()
        return step.failure

    @contextmanager
    def working(self, step: Step, counted: Literal["encode", "decode"], traced: str) -> Iterator[None]:
        """Around work on a gradient of a step.

        Args:
            counted: adds its seconds to this counter.
            traced: the parameter's name.
        """
        begin, stats = perf_counter(), self._engine.stats
        if counted == "encode":
            self.come(step, 1)
        else:
            self.resume(step)
        try:
            yield
        finally:
            end = perf_counter()
            seconds = end - begin
            stats.add(encode=seconds) if counted == "encode" else stats.add(decode=seconds)
            if stats.watch is not None:
                stats.watch.add(counted, traced, begin, end)
            self.rest()
