"""IndexedSlices, as the gradients of embeddings. Horovod passes them to no compression: it allgathers their values and
their indices in a conditional (is there more than one rank?), which has one gradient in it, or a group of them.

The conditionals with IndexedSlices are searched for while the graph is traced, each time that Horovod passes a dense
gradient, and once more at the end. Then their inputs are replaced, and what reads their outputs reads others::

    values, indices -> encode -> carrier, container -> Horovod's conditional -> decode -> reduced values, indices

The container travels in place of the indices, which Horovod does not scale. The carrier is a row of ones in place of
the values. It shows by which factor Horovod scales the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvd_deepreduce.codecs.interfaces import Floats
from hvd_deepreduce.codecs.sparse_tensor import MAX_NUMEL
from hvd_deepreduce.engine import Engine, Parameter, rows
from hvd_deepreduce.engine.graph.slots import Graph, Slot
from hvd_deepreduce.engine.graph.steps import Steps
from hvd_deepreduce.exchange import traffic
from hvd_deepreduce.tensorflow.failures import numpy_function
from hvd_deepreduce.tensorflow.graph import conditionals
from hvd_deepreduce.wire.standalone import ContainerError

Numbers = npt.NDArray[Any]


class Found(NamedTuple):
    """IndexedSlices that Horovod reduces, in a conditional.

    Attributes:
        conditional: its operation.
        own: this rank's IndexedSlices, in the graph of the conditional.
        values, indices: those outputs of the conditional that are what they are reduced to.
    """

    conditional: tf.Operation
    own: tf.IndexedSlices
    values: tf.Tensor
    indices: tf.Tensor

    @property
    def shape(self) -> tf.TensorShape:
        """Of the gradient: what is known of it before it is there."""
        known = tf.TensorShape(tf.get_static_value(self.own.dense_shape, partial=True))
        return known.merge_with(tf.TensorShape([None]).concatenate(self.own.values.shape[1:]))


def find(place: tf.Graph, first: int, scopes: Collection[str]) -> list[Found]:
    """The IndexedSlices in Horovod's conditionals among the operations of a graph.

    Args:
        first: the number of the first operation to look at.
        scopes: name scopes of the conditionals: those of other tapes and optimizers have other compressions.
    """
    return [found for operation in conditionals(place, first, scopes) for found in _found(operation)]


def _found(conditional: tf.Operation) -> list[Found]:
    # Where there is one rank, Horovod's conditional returns what it was given.
    branch = conditional._false_graph
    outer = {id(inner): given for given, inner in branch.captures}
    found, at = [], 0
    for own in tf.nest.flatten(branch.structured_outputs):
        parts = tf.nest.flatten(own, expand_composites=True)
        given = [outer.get(id(_origin(part))) for part in parts]
        if isinstance(own, tf.IndexedSlices) and len(given) == 3 and all(one is not None for one in given):
            values, indices = conditional.outputs[at : at + 2]
            found.append(Found(conditional, tf.IndexedSlices(*given), values, indices))
        at += len(parts)
    return [one for one in found if one.shape.rank is not None]


def _origin(tensor: tf.Tensor) -> tf.Tensor:
    """What a tensor is the identity of."""
    while tensor.op.type == "Identity":
        (tensor,) = tensor.op.inputs
    return tensor


def count(found: Iterable[Found], graph: Graph, number: tf.Tensor, engine: Engine, steps: Steps) -> None:
    """Adds operations that count the bytes of IndexedSlices that Horovod sends by itself.

    Args:
        number: of the graph's run.
    """

    def add(own: np.int64, total: np.int64, dense: np.int64, number: np.int64) -> np.int64:
        if engine.collectives.size() > 1:
            steps.reach(graph, int(number))
            _add(engine, int(own), int(total), int(dense))
        return own

    for one in found:
        dense = tf.reduce_prod(tf.cast(one.own.dense_shape, tf.int64)) * one.values.dtype.size
        inputs = [_bytes(one.own.values, one.own.indices), _bytes(one.values, one.indices), dense, number]
        _always(one, numpy_function(add, inputs, tf.int64, "deepreduce_sparse"))


def compress(found: Found, slot: Slot, number: tf.Tensor, engine: Engine, steps: Steps) -> None:
    """Adds the operations that compress IndexedSlices, and puts them around Horovod's conditional.

    They go as they are, and are counted, under settings that cannot compress them.

    Args:
        number: of the graph's run.
    """
    own, conditional = found.own, found.conditional

    def encode(values: Floats, indices: Numbers, shape: Numbers, number: np.int64) -> tuple[Numbers, Numbers]:
        engine.check_open()
        if engine.collectives.size() == 1:  # now, in an elastic job
            return values, indices
        step, parameter = steps.find(slot, int(number))
        with steps.working(step, "encode", parameter.name):
            engine.check_sparse(parameter, "give Horovod's optimizer or tape sparse_as_dense=True")
            slot.numel = math.prod(map(int, shape))
            if not _compressed(engine, parameter, slot):
                unsent = engine.take_unsent(parameter, lambda: bool(np.isfinite(values).all()))
                if unsent is not None:
                    numbers, more = rows.in_rows(unsent, slot.numel // int(shape[0]))
                    values = np.concatenate([values, more.astype(values.dtype).reshape(-1, *values.shape[1:])])
                    indices = np.concatenate([indices, numbers.astype(indices.dtype)])
                slot.own = values.nbytes + indices.nbytes
                return values, indices
            slot.own, slot.key = None, engine.key(parameter)
            flat = values.reshape(indices.size, slot.numel // int(shape[0])).astype(slot.accumulated_in)
            packed = engine.encode_sparse(parameter, rows.flattened(indices, flat, slot.numel))
        return np.ones((1, *values.shape[1:]), values.dtype), rows.as_integers(packed, indices.dtype)

    def decode(values: Floats, indices: Numbers, shape: Numbers, number: np.int64) -> tuple[Numbers, Numbers]:
        if engine.collectives.size() == 1:
            return values, indices
        step, parameter = steps.find(slot, int(number))
        with steps.working(step, "decode", parameter.name):
            if slot.own is not None:
                dense = slot.numel * values.itemsize
                _add(engine, slot.own, values.nbytes + indices.nbytes, dense)
            else:
                try:
                    values, indices = _decoded(engine, parameter, slot, values, indices, shape)
                except Exception as error:
                    # All ranks get the same error, and raise it at the end of the step (Operations.decode).
                    values, indices = values[:0], indices[:0]
                    step.failure = step.failure or error
        steps.end(step, parameter)
        return values, indices

    types = [own.values.dtype, own.indices.dtype]
    inputs = [own.values, own.indices, own.dense_shape, number]
    sent = numpy_function(encode, inputs, types, "deepreduce_encode_slices")
    readers = [list(one.consumers()) for one in (found.values, found.indices)]
    inputs = [found.values, found.indices, own.dense_shape, number]
    reduced = numpy_function(decode, inputs, types, "deepreduce_decode_slices")
    _always(found, reduced[0])
    for before, after, row in ((own.values, sent[0], found.shape[1:]), (own.indices, sent[1], [])):
        after.set_shape(tf.TensorShape([None]).concatenate(row))
        _replace([conditional], before, after)
    for before, after, reading in zip((found.values, found.indices), reduced, readers, strict=True):
        after.set_shape(before.shape)
        _replace(reading, before, after)


def _compressed(engine: Engine, parameter: Parameter, slot: Slot) -> bool:
    """Whether IndexedSlices with so many elements are compressed; the same on all ranks."""
    if engine.dense or not engine.takes_sparse(parameter):
        return False
    if not slot.dtype.is_floating or not 0 < slot.numel <= MAX_NUMEL:
        return False
    return not engine.uncompressed(parameter, slot.numel, slot.sent_itemsize)


def _decoded(
    engine: Engine, parameter: Parameter, slot: Slot, carriers: Floats, gathered: Numbers, shape: Numbers
) -> tuple[Floats, Numbers]:
    """The values and indices of all ranks' containers."""
    ranks = engine.collectives.size()
    # There is one row for each rank. Horovod has divided it by the number of ranks, or has not (op=hvd.Sum).
    factor = float(carriers.reshape(-1)[0]) if carriers.shape[0] == ranks else 0.0
    if not (carriers == factor).all() or not 0.5 / ranks < factor < 2:
        raise ContainerError("ranks have sent no carriers of a sparse gradient: use one release and one config on all")
    packed = rows.from_integers(gathered, ranks)
    dense = slot.numel * carriers.itemsize
    # The engine counts the containers; here what is around them.
    _add(engine, carriers.nbytes // ranks + gathered.itemsize, carriers.nbytes + gathered.nbytes - packed.nbytes, dense)
    total = engine.decode_sparse(parameter, packed, slot.numel, slot.accumulated_in, 1 / round(1 / factor), slot.key)
    indices, values = rows.in_rows(total, slot.numel // int(shape[0]))
    return values.astype(carriers.dtype).reshape(-1, *shape[1:]), indices.astype(gathered.dtype)


def _add(engine: Engine, own: int, total: int, dense: int) -> None:
    """Counts an allgather of a gradient of ``dense`` bytes."""
    ranks = engine.collectives.size()
    share = traffic.allreduce(dense, ranks).sent
    engine.stats.add(wire=traffic.allgather(own, total, ranks), dense=share)


def _bytes(*tensors: tf.Tensor) -> tf.Tensor:
    return tf.add_n([tf.size(one, tf.int64) * one.dtype.size for one in tensors])


def _always(found: Found, result: tf.Tensor) -> None:
    """Lets an operation run that was added at the end of tracing, whether or not something reads its result."""
    found.conditional.graph.control_outputs.append(result.op)


def _replace(readers: Iterable[tf.Operation], before: tf.Tensor, after: tf.Tensor) -> None:
    """Lets operations read another tensor."""
    for reader in readers:
        for at, one in enumerate(reader.inputs):
            if one is before:
                reader._update_input(at, after)
