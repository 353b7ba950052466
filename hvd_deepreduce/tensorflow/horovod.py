r"""The adapter for stock Horovod on TensorFlow and Keras.

Horovod calls ``compress(gradient)`` and ``decompress(output, context)`` while TensorFlow traces a function, the eager
tape's own included. So both only lay operations into the graph:

    gradient -> encode -> container -> hvd.allgather -> decode -> reduced gradient
                     \-> carrier   -> hvd.allreduce -/

encode and decode are Python functions on the CPU. The carrier is one element, 1.0; what Horovod makes of it is the
factor by which Horovod would have scaled the gradient, as in the PyTorch adapter.

A bucket (scopes ``bucket`` and ``model``) needs several gradients, and each goes through operations of its own:

    gradient -> put ----> carrier -> hvd.allreduce -> dequeue -> take -> reduced gradient
                 | into the bucket                      ^          ^ out of the bucket
                 \-> a full bucket -> threads of ours -> a word that its sum is there

TensorFlow may have one thread alone, so no operation holds one while it waits: ``put`` and ``take`` do not wait, and a
dequeue is asynchronous, as Horovod's operations are. Threads of our own encode full buckets, send them and wait for
them. A bucket waits for all of its gradients, so none of them may need what another was reduced to: see ``_Unit``.

Which parameter does a gradient belong to? Its number is its place among the gradients that Horovod hands over in one
graph: the order of the tape's sources or the optimizer's variables, those without a gradient left out. Graphs whose
gradients have the same shapes and dtypes are one list of parameters (TensorFlow traces a function again for a new batch
size); the numbers of a second list, of other shapes, begin where the first list's ended. Where all of a model's
parameters get gradients, that is ``named_parameters()`` of the PyTorch adapter, and containers are equal byte for byte.
"""

from __future__ import annotations

import io
import json
import os
import re
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock, RLock
from typing import Any
from zipfile import BadZipFile

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.tensorflow.compression import Compressor
from tensorflow.python.ops import control_flow_util

from hvd_deepreduce.adapter import Parameter
from hvd_deepreduce.agreement import Parameters
from hvd_deepreduce.buckets import Bucket, BucketedAdapter, Layout
from hvd_deepreduce.codec import U8, Floats
from hvd_deepreduce.config import Config
from hvd_deepreduce.ops import arrays, device

LINE = 'optimizer = hvd.DistributedOptimizer(optimizer, compression=DeepReduce("topk_rice_qsgd"))'
# The name that Horovod's stall warning shows.
HANDSHAKE = "deepreduce.handshake.if_it_stalls_was_DeepReduce_given_the_process_set_of_the_optimizer"
XLA = (
    "a function that XLA compiles cannot hold Horovod's and DeepReduce's operations. Turn it off: "
    "tf.function(jit_compile=False), model.compile(..., jit_compile=False)"
)
# The condition, is there more than one rank, under which Horovod puts a tensor or group of a tape or optimizer.
CONDITION = re.compile(r"_Allreduce(_\d+)?/cond(_\d+)?$")
# More than there are buckets on their way at a time: where all of these wait, the next one would wait for them.
THREADS = 1000
# Python functions are no operations of XLA, and autograph has nothing to convert in this file.
plain = tf.autograph.experimental.do_not_convert
# Of each process set: how many DeepReduces have compared their configs; in one order on all ranks.
NUMBERS: dict[int, int] = {}
# Those that have not compared their models yet. They do so all at a time, in the order in which their graphs were
# built: TensorFlow may come to any of them first, and then on another rank to another one.
NEW: list[DeepReduce] = []
COMPARING = Lock()


@dataclass(eq=False)
class _Slot:
    """One gradient of one graph.

    Attributes:
        passes: it goes uncompressed.
        numel: -1 where it is not known before the gradient comes.
        queue: gets a word when the sum of the bucket is there.
        unit: with which others it may share a bucket.
    """

    graph: _Graph
    position: int
    name: str
    shape: tuple[int, ...]
    dtype: tf.DType
    passes: bool = False
    numel: int = -1
    queue: Any = None
    unit: _Unit | None = None

    @property
    def coded(self) -> np.dtype[Any]:
        """In what it is accumulated."""
        return np.dtype(np.float64 if self.dtype == tf.float64 else np.float32)


@dataclass(eq=False)
class _Unit:
    """Gradients of a graph that may share buckets: those of one tape or optimizer.

    All were there before the first of them was handed over, so none depends on what another is reduced to.

    Attributes:
        last: the last operation of the graph that was there then, by its number.
        order: which it is of those that may be on their way at a time.
    """

    last: int
    order: int
    slots: list[_Slot] = field(default_factory=list)


@dataclass(eq=False)
class _Run:
    """A graph at work: how far its step is.

    Attributes:
        number: of this run of the graph.
        begun, ended: how many gradients have come, and how many have been reduced.
        held: gradients that came before their unit could be laid out, for want of the others' sizes.
        layouts: of its units.
        slots: by parameter.
    """

    number: int
    begun: int = 0
    ended: int = 0
    failure: Exception | None = None
    held: dict[_Unit, list[tuple[_Slot, Floats]]] = field(default_factory=dict)
    layouts: dict[_Unit, Layout] = field(default_factory=dict)
    slots: dict[str, _Slot] = field(default_factory=dict)


@dataclass(eq=False)
class _Graph:
    """The gradients that Horovod handed over in one graph, in order.

    Attributes:
        counter: what numbers the graph's runs, by its name.
        coded: how many of the slots are compressed.
        built: how many of them have all their operations.
        unit: the last one.
        runs: how many there were.
        run: the one under way.
    """

    counter: str = ""
    slots: list[_Slot] = field(default_factory=list)
    coded: int = 0
    built: int = 0
    parameters: list[Parameter] | None = None
    unit: _Unit | None = None
    runs: int = 0
    run: _Run | None = None

    def passing(self) -> tuple[int, int]:
        """Bytes of what goes uncompressed: sent, and of the gradients."""
        sizes = [(int(np.prod(slot.shape)), slot.dtype) for slot in self.slots if slot.passes and -1 not in slot.shape]
        sent = sum(numel * (4 if dtype == tf.bfloat16 else dtype.size) for numel, dtype in sizes)
        return sent, sum(numel * dtype.size for numel, dtype in sizes)

    def signature(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        return tuple((slot.shape, slot.dtype.name) for slot in self.slots)


@dataclass(eq=False)
class _Context:
    """What ``decompress`` needs of ``compress``; ``container`` is None where there is none of this gradient alone."""

    slot: _Slot
    gradient: tf.Tensor
    run: tf.Tensor
    container: tf.Tensor | None = None


class DeepReduce(BucketedAdapter, Compressor, tf.train.experimental.PythonState):  # type: ignore[misc]
    """Sends a few percent of a gradient's bytes. For ``compression=`` of Horovod's tape and optimizers.

    Works with ``hvd.DistributedGradientTape``, ``hvd.DistributedOptimizer`` and ``hvd.keras.DistributedOptimizer``, in
    eager mode, tf.function and ``model.fit``; op Average and Sum, groups, backward_passes_per_step, sparse_as_dense,
    loss scaling and process_set. One DeepReduce for each model; all ranks must make it with the same config.

    It can be put into a ``tf.train.Checkpoint``: its residuals and steps are then saved and restored with the rest.
    Each rank's differ, so each rank must write a checkpoint of its own; in Keras, see ``SaveState``.

    Args:
        config: a preset's name, the path of a YAML file, a dict, a ``Config``, or None for the recommended settings.
        process_set: the one given to the tape or optimizer, if any.
        **settings: keys of the config, in place of its own.

    Raises:
        ConfigError: a config that cannot be used.
    """

    def __init__(
        self,
        config: str | Path | Mapping[str, Any] | Config | None = None,
        *,
        process_set: Any = None,
        **settings: Any,
    ) -> None:
        BucketedAdapter.__init__(self, config, hvd.global_process_set if process_set is None else process_set, settings)
        self._graphs: weakref.WeakKeyDictionary[tf.Graph, _Graph] = weakref.WeakKeyDictionary()
        # How many units there are in a function, its inner ones too; and in that with the most.
        self._units: weakref.WeakKeyDictionary[tf.Graph, int] = weakref.WeakKeyDictionary()
        self._orders = 0
        self._lists: dict[Any, list[Parameter]] = {}
        self._restored = False
        self._agreed = {"config": False, "parameters": False}
        self._failure: Exception | None = None
        self._agreeing = Lock()
        # TensorFlow encodes and decodes several tensors at a time.
        self._lock = RLock()
        self._coding = 0
        self._idle_since = 0.0
        # Of buckets. A layout lies here between steps; a step that is broken off takes its own with it.
        self._layouts: dict[Any, Layout] = {}
        self._under_way: dict[int, _Run] = {}
        self._allgathers: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {}
        self._sending = ThreadPoolExecutor(1, "deepreduce send")
        self._gathering = ThreadPoolExecutor(THREADS, "deepreduce allgather")
        self._number = 0

    def set_config(
        self, config: str | Path | Mapping[str, Any] | Config | None = None, /, **settings: Any
    ) -> None:
        """Changes the settings from the next step on; on all ranks, between the same two steps.

        Args:
            config: a whole new config; None: the one in force, with ``settings`` in place of its own.

        Raises:
            RuntimeError: gradients are in flight.
            ConfigError: a config that cannot be used; the old one stays in force.
            ValueError: buckets in place of single tensors, the other way around, or another ``min_elements`` of single
                tensors: this is fixed when the graph is built.
        """
        old, new = self._config, Config.load(self._config if config is None else config, **settings)
        if self._graphs and "tensor" in (old.scope, new.scope):
            fixed = "scope" if old.scope != new.scope else "min_elements"
            before, after = getattr(old, fixed), getattr(new, fixed)
            if before != after:
                raise ValueError(
                    f"{fixed} is {before!r} and cannot become {after!r}: which tensors are compressed, and which of "
                    "them together, is part of the graph. Make a new DeepReduce and a new optimizer"
                )
        super().set_config(new)
        self._failure = None
        self._layouts.clear()
        if self._graphs and self._agreed["config"]:
            try:
                self._prepare(self._orders)
            except RuntimeError:
                self._config = old
                raise

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and step counts. Each rank's differ: save and load them rank by rank."""
        lists = [[(p.name, p.shape, p.dtype) for p in parameters] for parameters in self._lists.values()]
        return {**super().state_dict(), "lists": lists}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up where ``state_dict`` left off; before the first step, too.

        Raises:
            ValueError: a state of another rank, another number of ranks, or another model; nothing has changed then.
        """
        if "lists" not in state:
            raise ValueError("this is no state of DeepReduce on TensorFlow: it has no lists")
        lists: dict[Any, list[Parameter]] = {}
        number = 0
        for described in state["lists"]:
            parameters = [
                Parameter(str(name), number + at, tuple(shape), str(dtype))
                for at, (name, shape, dtype) in enumerate(described)
            ]
            number += len(parameters)
            lists[_signature(parameters)] = parameters
        for signature in self._lists:
            if signature not in lists:
                raise _other_model(signature, lists)
        with self._lock:
            before, self._lists = self._lists, lists
            try:
                super().load_state_dict(state)
            except ValueError:
                self._lists = before
                raise
            for graph in self._graphs.values():
                graph.parameters = None
            self._layouts.clear()
            self._failure = None
            self._restored = bool(lists)

    def serialize(self) -> bytes:
        """``state_dict`` as bytes, for tf.train.Checkpoint."""
        state = self.state_dict()
        residuals = state.pop("residuals")
        state["residuals"] = list(residuals)
        file = io.BytesIO()
        text = np.frombuffer(json.dumps(state).encode(), np.uint8)
        np.savez(file, state=text, **{str(at): residual for at, residual in enumerate(residuals.values())})
        return file.getvalue()

    def deserialize(self, string_value: bytes) -> None:
        """Loads what ``serialize`` wrote; raises what ``load_state_dict`` raises."""
        try:
            with np.load(io.BytesIO(string_value), allow_pickle=False) as file:
                state = json.loads(file["state"].tobytes())
                state["residuals"] = {name: file[str(at)] for at, name in enumerate(state["residuals"])}
        except (OSError, KeyError, EOFError, ValueError, BadZipFile) as error:
            raise ValueError(f"this is no state of DeepReduce: {error}") from None
        self.load_state_dict(state)

    @plain
    def compress(self, tensor: tf.Tensor | None = None) -> tuple[tf.Tensor, Any]:
        """Called by Horovod with a gradient; returns what Horovod allreduces, and the context for ``decompress``.

        Raises:
            TypeError: the class was given as ``compression=``, not an instance.
            RuntimeError: in a function that XLA compiles, or outside any graph.
        """
        if tensor is None:
            raise TypeError(f"compression= was given the class DeepReduce, not an instance. Write: {LINE}")
        if tf.executing_eagerly():
            raise RuntimeError(
                "DeepReduce tells gradients apart by their place in a graph, and this tensor came outside any: use "
                "hvd.DistributedGradientTape or hvd.DistributedOptimizer, or call hvd.allreduce within a tf.function"
            )
        if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            raise RuntimeError(XLA)
        place = _place()
        graph = self._graphs.setdefault(place, _Graph())
        name = re.sub(r"[^A-Za-z0-9_.]", "_", tensor.name.removesuffix(":0"))
        shape = tuple(-1 if size is None else size for size in tensor.shape)
        slot = _Slot(graph, len(graph.slots), name, shape, tensor.dtype)
        small = self._config.scope == "tensor" and -1 not in shape and np.prod(shape) < self._config.min_elements
        slot.passes = not tensor.dtype.is_floating or bool(small)
        slot.numel = -1 if -1 in shape else int(np.prod(shape))
        graph.slots.append(slot)
        graph.coded += not slot.passes
        # Horovod reduces no bfloat16, and a group's tensors only of one dtype: the carrier has the gradient's.
        sent = tf.float32 if tensor.dtype == tf.bfloat16 else tensor.dtype
        with tf.device("CPU:0"):
            context = _Context(slot, tensor, self._counted(graph, place))
            if slot.passes:
                return tf.cast(tensor, sent), context
            with tf.init_scope(), tf.device("CPU:0"):
                slot.queue = tf.queue.FIFOQueue(1, [tf.uint8], [()])
            # Horovod's conditions with our operations in them have no order either: each has a resource of its own.
            slot.queue.size()
            flat = tf.reshape(tf.cast(tensor, slot.coded), [-1])
            if self._config.scope == "tensor":
                context.container, carrier = self._python(
                    self._encodes(slot), [flat, context.run], [tf.uint8, slot.coded], "deepreduce_encode"
                )
                context.container.set_shape([None])
            else:
                self._join(slot, tensor, place)
                (carrier,) = self._python(self._puts(slot), [flat, context.run], [slot.coded], "deepreduce_put")
            _without_order(carrier.op)
            carrier.set_shape([1])
            return tf.identity(tf.cast(carrier, sent), f"deepreduce_{name}"), context

    @plain
    def decompress(self, tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Called by Horovod with the allreduced carrier; returns the reduced gradient.

        Raises:
            ValueError: an operation that cannot be computed on compressed gradients, or another process set's.
            MismatchError: at the first gradient, where the ranks' configs differ.
            RuntimeError: an exchange over MPI in a job without MPI.
        """
        self._check(tensor.op)
        slot, gradient = ctx.slot, ctx.gradient
        slot.graph.built += 1
        if not self._agreed["config"] and self._process_set.included():
            if self._process_set.size() > 1:
                self._agree([])
            self._agreed["config"] = True
            with COMPARING:
                chosen = self._process_set.process_set_id
                self._number = NUMBERS[chosen] = NUMBERS.get(chosen, 0) + 1
                NEW.append(self)
        if slot.passes:
            return tf.cast(tensor, gradient.dtype)
        with tf.device("CPU:0"):
            if ctx.container is None:
                self._prepare(slot.unit.order + 1)
                with tf.control_dependencies([tensor]):
                    word = slot.queue.dequeue()
                (flat,) = self._python(self._takes(slot), [word, tensor, ctx.run], [slot.coded], "deepreduce_take")
            else:
                name = f"{tensor.op.name.rsplit('/', 1)[-1]}_container_{tensor.value_index}"
                with tf.device(self._gpu if self._gpu and hvd.nccl_built() else "CPU:0"):
                    gathered = hvd.allgather(
                        ctx.container,
                        name=name,
                        ignore_name_scope=tensor.op.get_attr("ignore_name_scope"),
                        process_set=self._process_set,
                    )
                inputs = [gathered, tensor, ctx.run]
                (flat,) = self._python(self._decodes(slot), inputs, [slot.coded], "deepreduce_decode")
            _without_order(flat.op)
        reduced = tf.cast(tf.reshape(flat, tf.shape(gradient)), gradient.dtype)
        reduced.set_shape(gradient.shape)
        return reduced

    @property
    def _gpu(self) -> str:
        """Where gradients are encoded and decoded; "": on the host."""
        return "GPU:0" if tf.config.list_logical_devices("GPU") else ""

    def _array(self, tensor: tf.Tensor) -> Any:
        """CuPy's array of a tensor's memory."""
        return device.from_dlpack(tensor)

    def _python(
        self, function: Callable[..., tuple[Any, ...]], inputs: list[tf.Tensor], types: list[Any], name: str
    ) -> list[tf.Tensor]:
        """An operation that calls ``function`` with arrays and returns its results: NumPy's arrays, or the first one
        CuPy's on a GPU."""
        gpu = self._gpu
        if not gpu:
            results: list[tf.Tensor] = tf.numpy_function(function, inputs, types, name=name)
            return results

        def eager(first: tf.Tensor, *others: tf.Tensor) -> list[tf.Tensor]:
            # TensorFlow shows nobody its stream: what it launched must be done before ours, and ours before it goes on.
            tf.test.experimental.sync_devices()
            array = self._array(first)
            with device.on_device_of(array):
                made = function(array, *(other.numpy() for other in others))
            device.synchronize(array)
            return [tf.constant(one) if isinstance(one, np.ndarray) else _tensor(one) for one in made]

        with tf.device(gpu):
            results = tf.py_function(plain(eager), inputs, types, name=name)
        return results

    def _counted(self, graph: _Graph, place: tf.Graph) -> tf.Tensor:
        """The number of the graph's run, in the graph."""
        if not graph.counter:

            def count() -> np.int64:
                with self._lock:
                    graph.runs += 1
                    if not graph.coded and self._process_set.included():  # a step without anything to compress
                        self._stats.step_began()
                        self._stats.sending(*graph.passing())
                        self._stats.step_ended()
                    return np.int64(graph.runs)

            with place.as_default():
                number = tf.numpy_function(count, [], tf.int64, name="deepreduce_run")
                number.set_shape([])
                _without_order(number.op)
            graph.counter = number.name
        return place.get_tensor_by_name(graph.counter)

    def _join(self, slot: _Slot, gradient: tf.Tensor, place: tf.Graph) -> None:
        """Finds the unit of a gradient that is sent in a bucket."""
        unit = slot.graph.unit
        if unit is None or gradient.graph is place and gradient.op._id > unit.last:
            root = place
            while getattr(root, "outer_graph", None) is not None and root.outer_graph.building_function:
                root = root.outer_graph
            self._units[root] = self._units.get(root, 0) + 1
            self._orders = max(self._orders, self._units[root])
            unit = slot.graph.unit = _Unit(place.get_operations()[-1]._id, self._units[root] - 1)
        unit.slots.append(slot)
        slot.unit = unit

    def _prepare(self, units: int) -> None:
        """Makes what the exchange needs, on all ranks at a time: for so many units on their way at a time."""
        if units and self._over_mpi and self._process_set.included():
            self._exchange_queue(units - 1)

    def _check(self, operation: tf.Operation) -> None:
        """Can this operation's result be had from compressed gradients?"""
        if operation.type not in ("HorovodAllreduce", "HorovodGroupedAllreduce"):
            raise ValueError(f"DeepReduce compresses what hvd.allreduce reduces, and this is a {operation.type}")
        reduce_op = operation.get_attr("reduce_op")
        if reduce_op == hvd.Adasum:
            raise ValueError(
                "op=hvd.Adasum cannot be computed on compressed gradients. Use op=hvd.Average or op=hvd.Sum"
            )
        if reduce_op not in (hvd.Average, hvd.Sum):
            raise ValueError("only op=hvd.Average and op=hvd.Sum can be computed on compressed gradients")
        if operation.get_attr("process_set_id") != self._process_set.process_set_id:
            raise ValueError(
                "the tape or optimizer has a process_set that DeepReduce was not given. Write: "
                "DeepReduce(..., process_set=process_set)"
            )

    def _encodes(self, slot: _Slot) -> Callable[[Floats, np.int64], tuple[U8, Floats]]:
        def encode(gradient: Floats, number: np.int64) -> tuple[U8, Floats]:
            run, parameter = self._begin(slot, int(number))
            with self._working(slot.graph, run), self._stats.timed("encode"):
                slot.numel = gradient.size
                packed = self._encode(parameter, gradient)
            self._stats.sending(packed.size + min(slot.dtype.size, 8), gradient.size * slot.dtype.size)
            return packed, np.ones(1, slot.coded)

        return encode

    def _decodes(self, slot: _Slot) -> Callable[[U8, Floats, np.int64], tuple[Floats]]:
        def decode(gathered: U8, carrier: Floats, number: np.int64) -> tuple[Floats]:
            with self._lock:
                run, parameter = self._run(slot, int(number)), self._parameter(slot)
            with self._working(slot.graph, run, decoding=True), self._stats.timed("decode"):
                out: Floats = arrays.empty(slot.numel, slot.coded, gathered)
                try:
                    self._decode(gathered, out, float(carrier[0]))
                except Exception as error:
                    # An error ends TensorFlow's step at once, and the other ranks would wait for what has not been
                    # sent by then. It is the same on every rank, so all can raise it at the end of the step.
                    out.fill(0)
                    run.failure = run.failure or error
            self._end(slot.graph, run, parameter)
            return (out,)

        return decode

    def _puts(self, slot: _Slot) -> Callable[[Floats, np.int64], tuple[Floats]]:
        def put(gradient: Floats, number: np.int64) -> tuple[Floats]:
            run, _ = self._begin(slot, int(number))
            with self._working(slot.graph, run), self._stats.timed("encode"):
                self._stats.sending(min(slot.dtype.size, 8), gradient.size * slot.dtype.size)
                self._put(run, slot, arrays.to_host(gradient) if self._over_mpi else gradient)
            return (np.ones(1, slot.coded),)

        return put

    def _put(self, run: _Run, slot: _Slot, flat: Floats) -> None:
        """A gradient goes into its bucket, which is sent with the last one; without waiting for anything."""
        unit = slot.unit
        assert unit is not None
        with self._lock:
            slot.numel = flat.size
            came = run.held.setdefault(unit, [])
            came.append((slot, flat))
            layout = run.layouts.get(unit)
            if layout is None and any(-1 in one.shape for one in unit.slots) and len(came) < len(unit.slots):
                came[-1] = (slot, flat.copy())  # TensorFlow takes its own memory back
                return
            layout = layout or self._lay_out(run, unit)
            run.held[unit] = []
            for one, gradient in came:
                layout.bucket_of[self._parameter(one).name].move(gradient)
        for one, gradient in came:
            parameter = self._parameter(one)
            bucket = layout.bucket_of[parameter.name]
            bucket.put(parameter.name, gradient)
            with self._lock:
                self._came(bucket, parameter)

    def _lay_out(self, run: _Run, unit: _Unit) -> Layout:
        """The buckets of a unit, in which nothing is yet."""
        if self._under_way.setdefault(unit.order, run) is not run:
            raise RuntimeError(
                "buckets of another step are on their way: an error ended it, or two functions with one DeepReduce run "
                "at a time. Other ranks may wait for them: begin again from a checkpoint; one DeepReduce for each model"
            )
        run.slots.update((self._parameter(slot).name, slot) for slot in unit.slots)
        members = [(self._parameter(slot).name, slot.numel, slot.coded, "") for slot in unit.slots]
        key = (unit.order, tuple(members))
        layout = self._layouts.pop(key, None)
        if layout is None:
            layout = Layout(members, self._limit(), self._parameter(unit.slots[0]).number, unit.order)
            for bucket in layout.buckets:
                # Horovod goes by names: the same on all ranks, where parameters' names may differ, and of no other
                # allgather that may be on its way.
                bucket.name = f"{self._number}.{unit.order}.{bucket.number}"
        layout.started, layout.run, layout.key = 0, run, key
        run.layouts[unit] = layout
        return layout

    def _start(self, bucket: Bucket) -> None:
        # It is called within an operation, whose thread TensorFlow wants back.
        self._sending.submit(self._send, bucket)

    def _send(self, bucket: Bucket) -> None:
        try:
            super()._start(bucket)
        except Exception as error:
            self._settle(bucket, error)
        else:
            bucket.pending.add_done_callback(lambda _: self._settle(bucket))

    def _settle(self, bucket: Bucket, failure: Exception | None = None) -> None:
        """The sum of a bucket is there, or will never be: its dequeues may go on. Called on threads of our own."""
        run = bucket.layout.run
        graph = run.slots[bucket.members[0]].graph
        with self._working(graph, run, decoding=True):
            try:
                if failure is None:
                    self._receive(bucket)
            except Exception as error:
                failure = error
        with self._lock, tf.init_scope(), tf.device("CPU:0"):
            if failure is not None:
                bucket.gradient.fill(0)
                run.failure = run.failure or failure
            if graph.run is run:
                word = tf.constant(1, tf.uint8)
                for name in bucket.members:
                    tf.raw_ops.QueueEnqueueV2(handle=run.slots[name].queue.queue_ref, components=[word])

    def _takes(self, slot: _Slot) -> Callable[[Any, Floats, np.int64], tuple[Floats]]:
        def take(word: Any, carrier: Floats, number: np.int64) -> tuple[Floats]:
            with self._lock:
                run, parameter = self._run(slot, int(number)), self._parameter(slot)
            assert slot.unit is not None
            with self._working(slot.graph, run, decoding=True), self._stats.timed("decode"):
                bucket = run.layouts[slot.unit].bucket_of[parameter.name]
                out: Floats = bucket.part(parameter.name) * (float(carrier[0]) / self._process_set.size())
            with self._lock:
                bucket.took(parameter.name)
            self._end(slot.graph, run, parameter)
            return (out,)

        return take

    def _begin(self, slot: _Slot, number: int) -> tuple[_Run, Parameter]:
        """A gradient has come; before the first of all goes anywhere, the ranks compare their models."""
        if not self._agreed["parameters"]:
            self._compare()
        with self._lock:
            run, parameter = self._run(slot, number), self._parameter(slot)
            run.begun += 1
        return run, parameter

    def _run(self, slot: _Slot, number: int) -> _Run:
        """The run of the slot's graph that has this number."""
        graph = slot.graph
        run = graph.run
        if run is None or run.number < number:
            run = graph.run = _Run(number)
            self._stats.step_began()
            self._stats.sending(*graph.passing())
        if run.number != number:
            raise RuntimeError("a step of a graph began before its last one had ended")
        return run

    def _end(self, graph: _Graph, run: _Run, parameter: Parameter) -> None:
        """A gradient has been reduced; with the last one, the step has."""
        with self._lock:
            self._in_flight.discard(parameter.name)
            run.ended += 1
            if run.ended < graph.coded:
                return
            graph.run = None
            for unit, layout in run.layouts.items():
                self._layouts[layout.key] = layout
                del self._under_way[unit.order]
            self._stats.step_ended()
        if run.failure is not None:
            raise run.failure

    @contextmanager
    def _working(self, graph: _Graph, run: _Run, decoding: bool = False) -> Iterator[None]:
        """Takes the time, once all gradients of a graph have come, in which there was nothing to do."""
        now = time.perf_counter()
        with self._lock:
            if decoding and not self._coding and run.begun == graph.coded:
                self._stats.took("wait", now - self._idle_since)
            self._coding += 1
        try:
            yield
        finally:
            with self._lock:
                self._coding -= 1
                self._idle_since = time.perf_counter()

    def _compare(self) -> None:
        """Compares the models of all ranks, of all DeepReduces that have not done so."""
        with COMPARING:
            new = list(NEW)
            NEW.clear()
            if self not in new and not self._agreed["parameters"]:
                new.append(self)
            for one in new:
                try:
                    with one._lock:
                        for graph in one._graphs.values():
                            if graph.built == len(graph.slots):  # no error ended its tracing
                                one._list(graph)
                        described = one._described()
                    one._agree(described)
                    one._agreed["parameters"] = True
                except Exception as error:
                    one._failure = error
        if self._failure is not None:
            raise self._failure

    def _parameter(self, slot: _Slot) -> Parameter:
        """The parameter of a slot; by now, its graph is complete."""
        return self._list(slot.graph)[slot.position]

    def _list(self, graph: _Graph) -> list[Parameter]:
        """The parameters of a graph's slots."""
        if graph.parameters is None:
            signature = graph.signature()
            if signature not in self._lists:
                if self._restored:
                    raise _other_model(signature, self._lists)
                first = len(self._known())
                self._lists[signature] = [
                    Parameter(f"{first + s.position} {s.name}", first + s.position, s.shape, s.dtype.name)
                    for s in graph.slots
                ]
            self._restored = False
            graph.parameters = self._lists[signature]
        return graph.parameters

    def _start_allgather(self, packed: U8, name: str) -> Future[U8]:
        return self._gathering.submit(self._allgather, packed, name)

    def _wait_allgather(self, pending: Future[U8]) -> U8:
        return pending.result()

    def _allgather(self, packed: U8, name: str) -> U8:
        gather = self._allgathers.get(name)
        if gather is None:

            def gather_named(given: tf.Tensor) -> tf.Tensor:
                with tf.device("CPU:0"):
                    return hvd.allgather(given, f"deepreduce.bucket.{name}", process_set=self._process_set)

            # Only in a graph does Horovod's operation have its name. TensorFlow has a thread for it, as none waits.
            function = tf.function(plain(gather_named), input_signature=[tf.TensorSpec([None], tf.uint8)])
            gather = self._allgathers[name] = function.get_concrete_function()
        with tf.device("CPU:0"):
            gathered: U8 = gather(tf.constant(arrays.to_host(packed))).numpy()
        return gathered

    def _mpi_enabled(self) -> bool:
        return bool(hvd.mpi_enabled())

    def _mpi_ranks(self) -> list[int] | None:
        return None if self._process_set is hvd.global_process_set else list(self._process_set.ranks)

    def _local_size(self) -> int:
        return int(hvd.local_size())

    def _known(self) -> list[Parameter]:
        return [parameter for parameters in self._lists.values() for parameter in parameters]

    def _described(self) -> Parameters:
        # By number alone: a gradient's name may differ between ranks (the tape's use_generic_names).
        return [(str(parameter.number), parameter.shape, parameter.dtype) for parameter in self._known()]

    def _agree(self, parameters: Parameters) -> None:
        # Several tensors find the same difference at the same time: only the first asks the other ranks.
        with self._agreeing:
            if self._failure is None:
                try:
                    super()._agree(parameters)
                except Exception as error:
                    self._failure = error
        if self._failure is not None:
            raise self._failure

    def _gather(self, said: U8) -> U8:
        def gather(said: tf.Tensor) -> tf.Tensor:
            return hvd.allgather(said, HANDSHAKE, ignore_name_scope=True, process_set=self._process_set)

        with tf.init_scope(), tf.device("CPU:0"):
            # In a graph the operation has its name; but a graph needs TensorFlow's threads, and while a step runs, all
            # may be waiting for this.
            once = gather if self._agreed["config"] else tf.function(plain(gather))
            gathered: U8 = once(tf.constant(said)).numpy()
        return gathered


class SaveState(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Saves a DeepReduce after each epoch of ``model.fit``, and restores it where training begins again.

    It goes beside ``tf.keras.callbacks.BackupAndRestore``, which does the same for model and optimizer, and like that
    one it takes its file away when training has come to its end. Give it to all ranks: each has its own file.

    Args:
        compression: what the optimizer was given.
        folder: where ``deepreduce.rank<n>.npz`` is written.
        delete: take the file away at the end of training.
    """

    def __init__(self, compression: DeepReduce, folder: str | Path, delete: bool = True) -> None:
        super().__init__()
        self.compression = compression
        self.path = Path(folder) / f"deepreduce.rank{hvd.rank()}.npz"
        self.delete = delete

    def on_train_begin(self, logs: Any = None) -> None:
        if self.path.exists():
            self.compression.deserialize(self.path.read_bytes())

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_bytes(self.compression.serialize())
        os.replace(part, self.path)

    def on_train_end(self, logs: Any = None) -> None:
        if self.delete:
            self.path.unlink(missing_ok=True)


def _tensor(array: Any) -> tf.Tensor:
    """The tensor of an array's memory on a GPU."""
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def _place() -> tf.Graph:
    """The graph in which hvd.allreduce, the tape or the optimizer was called."""
    graph = tf.compat.v1.get_default_graph()
    outer = getattr(graph, "outer_graph", None)
    return outer if outer is not None and CONDITION.search(outer.get_name_scope()) else graph


def _without_order(operation: tf.Operation) -> None:
    """TensorFlow runs what is stateful, and has no resource, one after the other in the program's order; not this one.

    It would put a gradient into its bucket after it has taken another out, which waits for the bucket to be full.
    """
    manager = getattr(tf.compat.v1.get_default_graph(), "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(operation)


def _signature(parameters: list[Parameter]) -> tuple[tuple[tuple[int, ...], str], ...]:
    return tuple((parameter.shape, parameter.dtype) for parameter in parameters)


def _other_model(signature: Any, lists: Any) -> ValueError:
    def shown(one: Any) -> str:
        return ", ".join(f"{dtype} {list(shape)}" for shape, dtype in one[:8]) + (", ..." if len(one) > 8 else "")

    return ValueError(
        f"the state is of another model: its gradients are {' or '.join(map(shown, lists))}, and here they are "
        f"{shown(signature)}"
    )
