"""Counts the IndexedSlices that Horovod sends by itself: it allgathers their values and indices, uncompressed.

Horovod passes them to no compression. But the conditional in which it puts each gradient, or group of gradients, is in
the graph by the time that it passes the next dense one; so an operation is added then that reads the sizes. What comes
after the last dense gradient cannot be counted, because nothing of DeepReduce is called any more: this is reported when
the graph first runs.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_deepreduce.engine import Engine
from hvd_deepreduce.exchange import traffic
from hvd_deepreduce.tensorflow.graph import CONDITIONAL, Graph, without_order
from hvd_deepreduce.tensorflow.steps import Steps

GATHERS = ("HorovodAllgather", "HorovodGroupedAllgather")


def conditionals(place: tf.Graph, first: int = 0) -> list[tf.Operation]:
    """Horovod's conditionals with IndexedSlices among the operations of a graph, from the number ``first`` on."""
    return [
        operation
        for operation in place.get_operations()[first:]
        if operation.type in ("If", "StatelessIf") and CONDITIONAL.search(operation.name) and _gathers(operation)
    ]


def _gathers(conditional: tf.Operation) -> list[tf.Operation]:
    """The allgathers in a conditional that are not those of containers."""
    branch = getattr(conditional, "_true_graph", None)
    found = [] if branch is None else [one for one in branch.get_operations() if one.type in GATHERS]
    return [one for one in found if "_container_" not in one.name]


def count(graph: Graph, place: tf.Graph, number: tf.Tensor, engine: Engine, steps: Steps) -> None:
    """Adds operations for the conditionals that have come into the graph since the last call; only on ranks that take
    part.

    Args:
        number: of the graph's run.
    """
    first, graph.searched = graph.searched, len(place.get_operations())
    for conditional in conditionals(place, first):
        graph.sparse += 1
        outer = {id(inner): given for given, inner in conditional._true_graph.captures}
        own = [outer[id(one)] for gather in _gathers(conditional) for one in gather.inputs if id(one) in outer]
        # A result is values, indices and shape; a dense gradient of the same group is one tensor.
        outputs = list(conditional.outputs)
        starts = [at for at, one in enumerate(outputs[:-2]) if _is_slices(*outputs[at : at + 3])]
        with place.as_default(), tf.device("CPU:0"):
            total = _bytes(chain.from_iterable(outputs[at : at + 2] for at in starts))
            dense = tf.add_n([tf.reduce_prod(_int64(outputs[at + 2])) * outputs[at].dtype.size for at in starts])
            inputs = [_bytes(own), total, dense, number]
            done = tf.numpy_function(_counter(graph, engine, steps), inputs, tf.int64, name="deepreduce_sparse")
            without_order(done.op)


def _is_slices(values: tf.Tensor, indices: tf.Tensor, shape: tf.Tensor) -> bool:
    integers = indices.dtype.is_integer and shape.dtype.is_integer
    return bool(values.dtype.is_floating and integers and indices.shape.rank == shape.shape.rank == 1)


def _int64(tensor: tf.Tensor) -> tf.Tensor:
    return tf.cast(tensor, tf.int64)


def _bytes(tensors: Any) -> tf.Tensor:
    return tf.add_n([tf.size(one, tf.int64) * one.dtype.size for one in tensors])


def _counter(graph: Graph, engine: Engine, steps: Steps) -> Any:
    def add(own: np.int64, total: np.int64, dense: np.int64, number: np.int64) -> np.int64:
        ranks = engine.collectives.size()
        if ranks > 1:
            steps.reach(graph, int(number))
            share = traffic.allreduce(int(dense), ranks).sent
            engine.stats.add(wire=traffic.allgather(int(own), int(total), ranks), dense=share)
        return own

    return add
