"""The gradients in TensorFlow's graphs while they are traced.

A gradient is identified by its position among the gradients that Horovod reduces in one graph: the order of the tape's
sources or the optimizer's variables, without those that have no gradient.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Collection

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
        # Those of each outermost function and its inner functions, in order.
        self._inside: weakref.WeakKeyDictionary[tf.Graph, list[Graph]] = weakref.WeakKeyDictionary()

    def all(self) -> list[Graph]:
        """The graphs that still exist."""
        return list(self._graphs.values())

    def of(self, place: tf.Graph) -> tuple[Graph, bool]:
        """What is known of the graph ``place``, and whether that is nothing yet."""
        graph = self._graphs.get(place)
        if graph is not None:
            return graph, False
        inside = self._inside.setdefault(_outermost(place), [])
        graph = self._graphs[place] = Graph(len(inside))
        inside.append(graph)
        return graph, True

    def join_unit(self, slot: Slot, gradient: tf.Tensor, place: tf.Graph) -> None:
        """Finds the unit of a gradient that is sent in a bucket."""
        units = slot.graph.units
        if not units or gradient.graph is place and gradient.op._id > units[-1].last_operation:
            queue = sum(len(one.units) for one in self._inside[_outermost(place)])
            self.queues = max(self.queues, queue + 1)
            units.append(Unit(place.get_operations()[-1]._id, queue))
        unit = units[-1]
        unit.slots.append(slot)
        unit.known = unit.known and -1 not in slot.shape
        slot.unit = unit


def add_slot(graph: Graph, tensor: tf.Tensor, shape: tf.TensorShape) -> Slot:
    """A new gradient in a graph: a tensor, or the values of IndexedSlices; with its shape."""
    name = re.sub(r"[^A-Za-z0-9_.]", "_", tensor.name.removesuffix(":0"))
    slot = Slot(graph, len(graph.slots), name, tuple(-1 if size is None else size for size in shape), tensor.dtype)
    graph.slots.append(slot)
    return slot


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
