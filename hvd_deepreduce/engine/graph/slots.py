"""What is known of the gradients of a framework's graphs, and of the steps that run them.

A gradient is identified by its position among the gradients that are reduced in one graph. ``parameters.py`` turns
positions into parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.engine.parameter import Parameter

AGAIN = "a function was run again before its previous run had ended: run it again after its results are there"

Signature = tuple[tuple[tuple[int, ...], str], ...]
"""(shape, dtype) of each gradient of a graph."""


@dataclass(eq=False)
class Slot:
    """One gradient of one graph.

    Attributes:
        position: among the graph's gradients.
        dtype: the framework's, with ``name`` and ``size``.
        shape: -1 for a size that is not known before the gradient is there.
        uncompressed: Horovod reduces it as it is.
        numel: -1 where it is not known before the gradient is there.
        key: of the container of the gradient that is in flight.
        own: bytes of the IndexedSlices in flight that go as they are; None: they are in a container.
        unit: the gradients with which it may share a bucket; None: it is in none.
        accumulated_in: dtype of its flat array.
        itemsize: bytes of an element.
        sent_itemsize: the same where Horovod reduces the gradient as it is: bfloat16 is sent as float32.
    """

    graph: Graph
    position: int
    name: str
    shape: tuple[int, ...]
    dtype: Any
    uncompressed: bool = False
    numel: int = field(init=False)
    key: RngKey = RngKey(0, 0, 0)
    own: int | None = None
    unit: Unit | None = None

    def __post_init__(self) -> None:
        self.numel = -1 if -1 in self.shape else prod(self.shape)
        self.accumulated_in = np.dtype(np.float64 if self.dtype.name == "float64" else np.float32)
        self.itemsize = int(self.dtype.size)
        self.sent_itemsize = 4 if self.dtype.name == "bfloat16" else self.itemsize


@dataclass(eq=False)
class Unit:
    """Gradients of a graph that may share buckets: those of one tape or optimizer.

    A bucket waits for all of its gradients, so none of them may depend on another one's result. All gradients of a unit
    were in the graph before Horovod passed the first of them.

    Attributes:
        last_operation: the number of the graph's last operation at that time.
        queue: number of the unit among those whose buckets can be in flight at the same time.
        runtime: what runs its operations: ``NativeUnit`` or ``PythonUnit``; None before the first is made.
        run: of them, that is under way.
        dense: whether Horovod reduces the gradients of the run that has begun last.
        waiting: whether residuals wait for a dense run.
        known: whether the sizes of all gradients are known before they are there.
        key: the graph's parameters, and the key of the unit's run with them, where ``known``.
    """

    last_operation: int
    queue: int
    slots: list[Slot] = field(default_factory=list)
    runtime: Any = None
    run: Any = None
    dense: bool = False
    waiting: bool = True
    known: bool = True
    key: tuple[Any, Any] = None, None


@dataclass(eq=False)
class Step:
    """One run of a graph.

    Attributes:
        number: of the graph's run.
        begun, ended: numbers of compressed gradients that have come, and that have been reduced.
        failure: raised at the end of the step.
    """

    graph: Graph
    number: int
    begun: int = 0
    ended: int = 0
    failure: Exception | None = None


@dataclass(eq=False)
class Graph:
    """The gradients that Horovod reduces in one graph, in order.

    Attributes:
        index: its number in the outermost function.
        counter: name of the tensor that numbers the graph's runs.
        compressed: number of slots that are compressed.
        built: number of slots that have all of their operations.
        parameters: of the slots; None before they are known.
        generation: the engine's, when it found them.
        units: in the order in which they began.
        runs: how many there were.
        reached: the number of the last run whose step has begun.
        step: the one under way.
        scopes: name scopes of the conditionals in which Horovod passed them.
        taken: names of the operations in C++ that hand out sums, in this graph or in a conditional.
        searched: how many of its operations were searched for IndexedSlices.
        slices: those that were found, with their slots, while the graph is traced.
    """

    index: int = 0
    counter: str = ""
    slots: list[Slot] = field(default_factory=list)
    compressed: int = 0
    built: int = 0
    parameters: list[Parameter] | None = None
    generation: int = -1
    units: list[Unit] = field(default_factory=list)
    runs: int = 0
    reached: int = 0
    step: Step | None = None
    scopes: set[str] = field(default_factory=set)
    taken: set[str] = field(default_factory=set)
    searched: int = 0
    slices: list[tuple[Any, Slot]] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether tracing went through: no error ended it."""
        return self.built == len(self.slots)

    @cached_property
    def uncompressed_bytes(self) -> tuple[int, int]:
        """Bytes of the gradients that go uncompressed: as they are sent, and as they are; once a step has begun."""
        known = [slot for slot in self.slots if slot.uncompressed and -1 not in slot.shape]
        return sum(slot.numel * slot.sent_itemsize for slot in known), sum(slot.numel * slot.itemsize for slot in known)

    def signature(self) -> Signature:
        """(shape, dtype) of each gradient."""
        return tuple((slot.shape, slot.dtype.name) for slot in self.slots)
