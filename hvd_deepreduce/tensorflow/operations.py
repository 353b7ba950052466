"""The operations that are added to a graph for each gradient: those in C++, or Python functions on arrays, on the CPU
or a GPU."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_deepreduce.codecs.interfaces import Floats
from hvd_deepreduce.engine import Engine, step_check
from hvd_deepreduce.engine.graph.buckets import GraphBuckets
from hvd_deepreduce.engine.graph.runtime import Listener
from hvd_deepreduce.engine.graph.slots import Graph, Slot
from hvd_deepreduce.horovod import SAME_STEPS
from hvd_deepreduce.ops import device
from hvd_deepreduce.tensorflow.collectives import TensorFlowCollectives
from hvd_deepreduce.tensorflow.failures import OF_HOROVOD, numpy_function, told
from hvd_deepreduce.tensorflow.graph import conditionals, without_order
from hvd_deepreduce.tensorflow.handshake import Handshake
from hvd_deepreduce.tensorflow.native import Library, NativeUnit, library
from hvd_deepreduce.tensorflow.python_unit import PythonUnit

OTHER_GPU = (
    "the gradients of this rank are on GPU {number}, which TensorFlow calls GPU {told}, and the CUDA kernels would run "
    "there: TensorFlow tells other libraries its own number, which is another one after "
    "tf.config.set_visible_devices. Let each rank see its GPU alone. In place of set_visible_devices, write "
    'os.environ["CUDA_VISIBLE_DEVICES"] = str(hvd.local_rank()), after hvd.init() and before TensorFlow uses a GPU'
)


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
        if not tf.config.list_logical_devices("GPU"):
            return ""
        _check_memory_growth()
        return "GPU:0"

    @cached_property
    def native(self) -> Library | None:
        """The operations in C++; None: they are Python functions."""
        return None if self.gpu else library()

    def array(self, tensor: tf.Tensor) -> Any:
        """CuPy's array of a tensor's memory.

        Raises:
            RuntimeError: CuPy would take it for memory of another GPU than it is on.
        """
        array = device.from_dlpack(device.WithoutStream(tensor))
        if array.size:
            number = device.array_module(array).cuda.runtime.pointerGetAttributes(array.data.ptr).device
            if number != array.device.id:
                raise RuntimeError(OTHER_GPU.format(told=array.device.id, number=number))
        return array

    @property
    def exchanges(self) -> bool:
        """Whether this rank takes part, and may have others to exchange with."""
        collectives = self._collectives
        return collectives.elastic() or (collectives.included() and collectives.size() > 1)

    def count_runs(self, graph: Graph, place: tf.Graph) -> tf.Tensor:
        """The number of the graph's run, int64, in the graph. It is there once this step's step check is over.

        Where this rank does not take part, Horovod never runs the other operations.
        """
        if not graph.counter:
            with place.as_default():
                graph.counter = self._count(graph).name
        return place.get_tensor_by_name(graph.counter)

    def _count(self, graph: Graph) -> tf.Tensor:
        engine, steps, buckets, handshake = self._engine, self._steps, self._buckets, self._handshake
        included, exchanges = self._collectives.included(), self.exchanges
        chooses = exchanges and engine.choice is not None

        def count() -> tuple[np.int64, np.bool_]:
            with steps.lock:
                graph.runs += 1
                if not graph.compressed and included:
                    steps.reach(graph, graph.runs)
                if included and not exchanges:
                    buckets.begin(graph, graph.runs, place=False)  # Horovod may run none of its operations
                number, dense = graph.runs, False
            if chooses:
                assert engine.choice is not None
                engine.choice.begin_step()
                dense = not handshake.greets and engine.dense and handshake.models_agree
            if dense:
                buckets.begin(graph, number, place=True)
            return np.int64(number), np.bool_(dense)

        number, dense = numpy_function(count, [], [tf.int64, tf.bool], "deepreduce_run")
        number.set_shape([])
        dense.set_shape([])
        without_order(number.op)
        if chooses:  # a dense run need not meet
            number = tf.cond(dense, lambda: number, lambda: self._meet(graph, number))
            without_order(number.op)
            return number
        return self._meet(graph, number) if exchanges else number

    def _meet(self, graph: Graph, number: tf.Tensor) -> tf.Tensor:
        """``number``, once all ranks have met."""
        engine, handshake, buckets = self._engine, self._handshake, self._buckets

        def speak(number: np.int64) -> Floats:
            return engine.vote(handshake.speak(), place=self._place(graph))

        def hear(total: Floats, number: np.int64) -> np.int64:
            engine.tally(total, handshake.compare_models, SAME_STEPS)
            buckets.begin(graph, int(number), place=True)
            return number

        word = numpy_function(speak, [number], tf.float64, "deepreduce_word")
        word.set_shape([step_check.WORDS])
        # Functions of another name on another rank (use_generic_names of the tape) have their step checks in common.
        name = f"{OF_HOROVOD}_deepreduce_step_check_{handshake.number}_{graph.index}"
        total = hvd.allreduce(
            word, op=hvd.Sum, name=name, ignore_name_scope=True, process_set=self._collectives.process_set
        )
        heard = numpy_function(hear, [total, number], tf.int64, "deepreduce_heard")
        heard.set_shape([])
        for operation in (word.op, total.op, heard.op):
            without_order(operation)
        return heard

    def _place(self, graph: Graph) -> step_check.Place | None:
        """The graph's step, by its parameters: ranks may have traced a function again at other steps."""
        if self._handshake.models_agree:
            with suppress(ValueError):  # a state of another model, which the step itself refuses
                return {"step": self._steps.count(graph)}
        return None

    def put(self, slot: Slot, gradient: tf.Tensor, number: tf.Tensor, sent: tf.DType) -> tf.Tensor:
        """Puts a gradient, of any shape, into its bucket; returns its carrier, of the dtype ``sent``."""
        assert slot.unit is not None

        def make(listener: Listener) -> NativeUnit | PythonUnit:
            if self.native is not None:
                return NativeUnit(self.native, listener)
            return PythonUnit(self._call, listener, self._engine)

        runtime = self._buckets.runtime(slot.unit, slot.graph, make)
        gradient = tf.cast(gradient, slot.accumulated_in)
        carrier = runtime.put(gradient, number, sent, len(slot.unit.slots) - 1, f"deepreduce_{slot.name}")
        if self._engine.choice is None:
            carrier.set_shape([1])
        return carrier

    def take(self, slot: Slot, carrier: tf.Tensor, number: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
        """The reduced gradient from its bucket, of the shape and dtype of the gradient."""
        assert slot.unit is not None
        at, dtype = slot.unit.slots.index(slot), tf.as_dtype(slot.accumulated_in)
        reduced = slot.unit.runtime.take(carrier, number, gradient, dtype, at)
        if self.native is not None:
            slot.graph.taken.add(reduced.op.name)
        reduced.set_shape(gradient.shape)
        return tf.cast(reduced, gradient.dtype)

    def read_all(self, graph: Graph, place: tf.Graph) -> None:
        """Lets operations in C++ run whether or not something reads their results: a bucket waits for all gradients."""
        if self.native is None or not graph.taken:
            return
        made = [one for one in place.get_operations() if one.name in graph.taken] + conditionals(place, 0, graph.scopes)
        with tf.device("CPU:0"):
            reader = self.native.all([result for one in made for result in one.outputs], name="deepreduce_all")
        without_order(reader)
        place.control_outputs.append(reader)

    def _call(
        self, function: Callable[..., tuple[Any, ...]], inputs: list[tf.Tensor], types: list[Any], name: str
    ) -> list[tf.Tensor]:
        """An operation that calls ``function`` with arrays and returns its results.

        Arrays are NumPy's; on a GPU, the first argument and the first result are CuPy's.
        """
        gpu = self.gpu
        if not gpu:
            results: list[tf.Tensor] = numpy_function(function, inputs, types, name)
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
            results = tf.py_function(tf.autograph.experimental.do_not_convert(told(eager)), inputs, types, name=name)
        return results


def _check_memory_growth() -> None:
    """Warns if TensorFlow takes all of a GPU's memory for itself, so that CuPy finds none."""
    if os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH", "").lower() in ("true", "1"):
        return
    for gpu in tf.config.get_visible_devices("GPU"):
        if not tf.config.experimental.get_memory_growth(gpu):
            warnings.warn(
                f"TensorFlow takes all of the memory of {gpu.name} for itself, and DeepReduce encodes gradients there: "
                "set the environment variable TF_FORCE_GPU_ALLOW_GROWTH=true, or call "
                "tf.config.experimental.set_memory_growth(gpu, True) for each GPU before anything uses it",
                RuntimeWarning,
                stacklevel=2,
            )


def _tensor(array: Any) -> tf.Tensor:
    """The tensor of an array's memory on a GPU."""
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
