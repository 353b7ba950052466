"""The operations that are added to a graph for each gradient: Python functions on arrays, on the CPU or a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_deepreduce.codec import U8, Floats
from hvd_deepreduce.engine import Engine, meeting
from hvd_deepreduce.ops import arrays, device
from hvd_deepreduce.tensorflow.buckets import GraphBuckets
from hvd_deepreduce.tensorflow.collectives import TensorFlowCollectives
from hvd_deepreduce.tensorflow.graph import Graph, Slot, without_order
from hvd_deepreduce.tensorflow.handshake import Handshake


class Operations:
    """Adds operations to the graph that is being traced.

    Flat arrays are ``[numel]``, float32 or float64. ``number`` is the scalar int64 tensor that ``count_runs`` returned.
    """

    def __init__(
        self, engine: Engine, collectives: TensorFlowCollectives, buckets: GraphBuckets, handshake: Handshake
    ) -> None:
        self._engine = engine
        self._collectives = collectives
        self._buckets = buckets
        self._steps = buckets.steps
        self._handshake = handshake

    @cached_property
    def gpu(self) -> str:
        """The device on which gradients are encoded and decoded; "": the host."""
        return "GPU:0" if tf.config.list_logical_devices("GPU") else ""

    def array(self, tensor: tf.Tensor) -> Any:
        """CuPy's array of a tensor's memory."""
        return device.from_dlpack(tensor)

    @property
    def exchanges(self) -> bool:
        """Whether this rank takes part, and may have others to exchange with."""
        process_set = self._collectives.process_set
        return bool(self._collectives.elastic() or (process_set.included() and process_set.size() > 1))

    def count_runs(self, graph: Graph, place: tf.Graph) -> tf.Tensor:
        """The number of the graph's run, int64, in the graph. It is there once this step's meeting is over.

        Where this rank does not take part, Horovod never runs the other operations.
        """
        if not graph.counter:
            steps, process_set = self._steps, self._collectives.process_set

            def count() -> np.int64:
                with steps.lock:
                    graph.runs += 1
                    if not graph.compressed and process_set.included():
                        steps.reach(graph, graph.runs)
                    return np.int64(graph.runs)

            with place.as_default():
                number = tf.numpy_function(count, [], tf.int64, name="deepreduce_run")
                number.set_shape([])
                without_order(number.op)
                if self.exchanges:
                    number = self._meet(graph, number)
            graph.counter = number.name
        return place.get_tensor_by_name(graph.counter)

    def _meet(self, graph: Graph, number: tf.Tensor) -> tf.Tensor:
        """``number``, once all ranks have met."""
        engine, handshake = self._engine, self._handshake

        def speak(number: np.int64) -> Floats:
            return engine.word(handshake.models_agree)

        def hear(total: Floats, number: np.int64) -> np.int64:
            engine.hear(total, handshake.compare_models)
            return number

        word = tf.numpy_function(speak, [number], tf.float64, name="deepreduce_word")
        word.set_shape([meeting.WORDS])
        # Functions of another name on another rank (use_generic_names of the tape) have their meetings in common.
        name = f"deepreduce_meeting_{handshake.number}_{graph.index}"
        total = hvd.allreduce(
            word, op=hvd.Sum, name=name, ignore_name_scope=True, process_set=self._collectives.process_set
        )
        heard = tf.numpy_function(hear, [total, number], tf.int64, name="deepreduce_heard")
        heard.set_shape([])
        for operation in (word.op, total.op, heard.op):
            without_order(operation)
        return heard

    def encode(self, slot: Slot, flat: tf.Tensor, number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The gradient's container, uint8 ``[n]``, and its carrier."""

        def encode(gradient: Floats, number: np.int64) -> tuple[U8, Floats]:
            self._engine.check_open()
            step, parameter = self._steps.begin(slot, int(number))
            with self._steps.working(step, "encode"):
                slot.numel, slot.key = gradient.size, self._engine.key(parameter)
                packed = self._engine.encode(parameter, gradient)
            self._engine.count_allreduce(slot.carrier_bytes, gradient.size * slot.dtype.size)
            return packed, np.ones(1, slot.accumulated_in)

        types = [tf.uint8, slot.accumulated_in]
        container, carrier = self._call(encode, [flat, number], types, "deepreduce_encode")
        container.set_shape([None])
        without_order(carrier.op)
        return container, carrier

    def decode(self, slot: Slot, gathered: tf.Tensor, carrier: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        """The reduced gradient, flat, from all ranks' containers."""

        def decode(gathered: U8, carrier: Floats, number: np.int64) -> tuple[Floats]:
            step, parameter = self._steps.find(slot, int(number))
            with self._steps.working(step, "decode"):
                out: Floats = arrays.empty(slot.numel, slot.accumulated_in, gathered)
                try:
                    self._engine.decode(parameter, gathered, out, self._scale(carrier), slot.key)
                except Exception as error:
                    # TensorFlow ends a step at its first error, while other ranks wait for gradients that this rank
                    # has not sent. All ranks get the same error, so all can raise it at the end of the step.
                    out.fill(0)
                    step.failure = step.failure or error
            self._steps.end(step, parameter)
            return (out,)

        (flat,) = self._call(decode, [gathered, carrier, number], [slot.accumulated_in], "deepreduce_decode")
        without_order(flat.op)
        return flat

    def put(self, slot: Slot, flat: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        """Puts the gradient into its bucket; returns its carrier."""

        def put(gradient: Floats, number: np.int64) -> tuple[Floats]:
            self._engine.check_open()
            step, _ = self._steps.begin(slot, int(number))
            with self._steps.working(step, "encode"):
                self._engine.count_allreduce(slot.carrier_bytes, gradient.size * slot.dtype.size)
                self._buckets.put(step, slot, gradient)
            return (np.ones(1, slot.accumulated_in),)

        (carrier,) = self._call(put, [flat, number], [slot.accumulated_in], "deepreduce_put")
        without_order(carrier.op)
        return carrier

    def take(self, slot: Slot, carrier: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        """The reduced gradient, flat, from its bucket."""

        def take(word: Any, carrier: Floats, number: np.int64) -> tuple[Floats]:
            step, parameter = self._steps.find(slot, int(number))
            with self._steps.working(step, "decode"):
                out = self._buckets.take(step, slot, parameter, self._scale(carrier))
            self._steps.end(step, parameter)
            return (out,)

        with tf.control_dependencies([carrier]):
            word = slot.queue.dequeue()
        (flat,) = self._call(take, [word, carrier, number], [slot.accumulated_in], "deepreduce_take")
        without_order(flat.op)
        return flat

    def _scale(self, carrier: Floats) -> float:
        return float(carrier[0]) / self._engine.collectives.size()

    def _call(
        self, function: Callable[..., tuple[Any, ...]], inputs: list[tf.Tensor], types: list[Any], name: str
    ) -> list[tf.Tensor]:
        """An operation that calls ``function`` with arrays and returns its results.

        Arrays are NumPy's; on a GPU, the first argument and the first result are CuPy's.
        """
        gpu = self.gpu
        if not gpu:
            results: list[tf.Tensor] = tf.numpy_function(function, inputs, types, name=name)
            return results

        def eager(first: tf.Tensor, *others: tf.Tensor) -> list[tf.Tensor]:
            # TensorFlow does not expose its stream. What it enqueued must be done before ours starts, and ours before
            # TensorFlow continues.
            tf.test.experimental.sync_devices()
            array = self.array(first)
            with device.on_device_of(array):
                made = function(array, *(other.numpy() for other in others))
            device.synchronize(array)
            return [tf.constant(one) if isinstance(one, np.ndarray) else _tensor(one) for one in made]

        with tf.device(gpu):
            results = tf.py_function(tf.autograph.experimental.do_not_convert(eager), inputs, types, name=name)
        return results


def _tensor(array: Any) -> tf.Tensor:
    """The tensor of an array's memory on a GPU."""
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
