"""The gradients in TensorFlow's graphs while they are traced.

A gradient is identified by its position among the gradients that Horovod reduces in one graph: the order of the tape's
sources or the optimizer's variables, without those that have no gradient.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Collection

import numpy as np
import tensorflow as tf

from hvd_deepreduce.engine.graph.slots import Graph, Slot, Unit

# The conditional (is there more than one rank?) in which Horovod puts a tensor or group of a tape or optimizer.
CONDITIONAL = re.compile(r"_Allreduce(_\d+)?/cond(_\d+)?$")


class Graphs:
    """All graphs with gradients of one DeepReduce.

    Attributes:
        queues: how many units' buckets can be in flight at the same time: the largest number of units in a function.
    """

    def __init__(self) -> None:
        self.queues = 0
        self._graphs: weakref.WeakKeyDictionary[tf.Graph, Graph] = weakref.WeakKeyDictionary()
        # Number of units in each outermost function, with those of its inner functions.
        self._units: weakref.WeakKeyDictionary[tf.Graph, int] = weakref.WeakKeyDictionary()
        # The index of the last graph in each outermost function.
        self._inside: weakref.WeakKeyDictionary[tf.Graph, int] = weakref.WeakKeyDictionary()

    def all(self) -> list[Graph]:
        """The graphs that still exist."""
        return list(self._graphs.values())

    def of(self, place: tf.Graph) -> tuple[Graph, bool]:
        """What is known of the graph ``place``, and whether that is nothing yet."""
        graph = self._graphs.get(place)
        if graph is not None:
            return graph, False
        root = _outermost(place)
        index = self._inside[root] = self._inside.get(root, -1) + 1
        graph = self._graphs[place] = Graph(index)
        return graph, True

    def add(self, graph: Graph, tensor: tf.Tensor, shape: tf.TensorShape, sparse: bool = False) -> Slot:
        """A new gradient in a graph: a tensor, or the values of IndexedSlices; with its shape."""
        name = re.sub(r"[^A-Za-z0-9_.]", "_", tensor.name.removesuffix(":0"))
        sizes = tuple(-1 if size is None else size for size in shape)
        slot = Slot(graph, len(graph.slots), name, sizes, tensor.dtype, sparse=sparse)
        slot.numel = -1 if -1 in sizes else int(np.prod(sizes))
        graph.slots.append(slot)
        return slot

    def choose(self, slot: Slot, small: bool) -> None:
        """Whether a new gradient goes uncompressed: if it is not floating, or small."""
        slot.uncompressed = small or not slot.dtype.is_floating
        slot.graph.compressed += not slot.uncompressed

    def join_unit(self, slot: Slot, gradient: tf.Tensor, place: tf.Graph) -> Unit:
        """Finds the unit of a gradient that is sent in a bucket."""
        units = slot.graph.units
        if not units or gradient.graph is place and gradient.op._id > units[-1].last_operation:
            root = _outermost(place)
            self._units[root] = self._units.get(root, 0) + 1
            self.queues = max(self.queues, self._units[root])
            units.append(Unit(place.get_operations()[-1]._id, self._units[root] - 1))
        unit = units[-1]
        unit.slots.append(slot)
        unit.known = unit.known and -1 not in slot.shape
        slot.unit = unit
        return unit


def current_place() -> tuple[tf.Graph, str]:
    """The graph in which hvd.allreduce, the tape or the optimizer was called, and the name scope of Horovod's
    conditionals for this call of a tape or optimizer; "": there are none."""
    graph = tf.compat.v1.get_default_graph()
    outer = getattr(graph, "outer_graph", None)
    name = "" if outer is None else outer.get_name_scope()
    return (outer, name.rpartition("/")[0]) if CONDITIONAL.search(name) else (graph, "")


def _outermost(place: tf.Graph) -> tf.Graph:
    """The function in which ``place`` is an inner function, or ``place``."""
    while getattr(place, "outer_graph", None) is not None and place.outer_graph.building_function:
        place = place.outer_graph
    return place


def conditionals(place: tf.Graph, first: int, scopes: Collection[str]) -> list[tf.Operation]:
    """Horovod's conditionals among the operations of a graph, from number ``first`` on, in these name scopes."""
    return [
        operation
        for operation in place.get_operations()[first:]
        if operation.type in ("If", "StatelessIf")
        and CONDITIONAL.search(operation.name)
        and operation.name.rpartition("/")[0] in scopes
    ]


def at_end(place: tf.Graph, callback: Callable[[], None]) -> None:
    """Calls ``callback`` when the function ``place`` has been traced, and operations can still be added to it."""
    place._add_scope_exit_callback(callback)


def without_order(operation: tf.Operation) -> None:
    """Lets an operation run as soon as its inputs are there.

    TensorFlow runs stateful operations without a resource in the program's order. It would put a gradient into its
    bucket only after it has taken another one out, which waits for the bucket to be full.
    """
    manager = getattr(tf.compat.v1.get_default_graph(), "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(operation)
