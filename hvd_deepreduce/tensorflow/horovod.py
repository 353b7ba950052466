"""The adapter for stock Horovod on TensorFlow and Keras.

Horovod calls ``compress(gradient)`` and ``decompress(output, context)`` while TensorFlow traces a function, the eager
tape's own included. So both only lay operations into the graph:

    gradient -> encode -> container -> hvd.allgather -> decode -> reduced gradient
                     \\-> carrier   -> hvd.allreduce -/

encode and decode are Python functions on the CPU. The carrier is one element, 1.0; what Horovod makes of it is the
factor by which Horovod would have scaled the gradient, as in the PyTorch adapter.

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary
from zipfile import BadZipFile

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.tensorflow.compression import Compressor
from tensorflow.python.ops import control_flow_util

from hvd_deepreduce.adapter import Adapter, Parameter
from hvd_deepreduce.agreement import Parameters
from hvd_deepreduce.codec import U8, Floats
from hvd_deepreduce.config import Config, ConfigError
from hvd_deepreduce.exchange.settings import AllGather

LINE = 'optimizer = hvd.DistributedOptimizer(optimizer, compression=DeepReduce("configs/topk_rice_qsgd.yaml"))'
# The name that Horovod's stall warning shows.
HANDSHAKE = "deepreduce.handshake.if_it_stalls_was_DeepReduce_given_the_process_set_of_the_optimizer"
XLA = (
    "a function that XLA compiles cannot hold Horovod's and DeepReduce's operations. Turn it off: "
    "tf.function(jit_compile=False), model.compile(..., jit_compile=False)"
)
# Python functions are no operations of XLA, and autograph has nothing to convert in this file.
plain = tf.autograph.experimental.do_not_convert


@dataclass(eq=False)
class _Slot:
    """One gradient of one graph; ``passes``: it goes uncompressed."""

    graph: _Graph
    position: int
    name: str
    shape: tuple[int, ...]
    dtype: tf.DType
    passes: bool = False
    numel: int = 0


@dataclass(eq=False)
class _Graph:
    """The gradients that Horovod handed over in one graph, in order, and how far its step is."""

    slots: list[_Slot] = field(default_factory=list)
    parameters: list[Parameter] | None = None
    begun: set[int] = field(default_factory=set)
    ended: int = 0
    failure: Exception | None = None

    @property
    def coded(self) -> int:
        """How many of the slots run Python."""
        return sum(not slot.passes or not slot.position for slot in self.slots)

    def passing(self) -> tuple[int, int]:
        """Bytes of what goes uncompressed: sent, and of the gradients."""
        sizes = [(int(np.prod(slot.shape)), slot.dtype) for slot in self.slots if slot.passes and -1 not in slot.shape]
        sent = sum(numel * (4 if dtype == tf.bfloat16 else dtype.size) for numel, dtype in sizes)
        return sent, sum(numel * dtype.size for numel, dtype in sizes)

    def signature(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        return tuple((slot.shape, slot.dtype.name) for slot in self.slots)


@dataclass(eq=False)
class _Context:
    """What ``decompress`` needs of ``compress``; ``container`` is None for a gradient that goes uncompressed."""

    slot: _Slot
    gradient: tf.Tensor
    container: tf.Tensor | None = None


class DeepReduce(Adapter, Compressor, tf.train.experimental.PythonState):  # type: ignore[misc]
    """Sends a few percent of a gradient's bytes. For ``compression=`` of Horovod's tape and optimizers.

    Works with ``hvd.DistributedGradientTape``, ``hvd.DistributedOptimizer`` and ``hvd.keras.DistributedOptimizer``, in
    eager mode, tf.function and ``model.fit``; op Average and Sum, groups, backward_passes_per_step, sparse_as_dense,
    loss scaling and process_set. One DeepReduce for each model; all ranks must make it with the same config.

    It can be put into a ``tf.train.Checkpoint``: its residuals and steps are then saved and restored with the rest.
    Each rank's differ, so each rank must write a checkpoint of its own; in Keras, see ``SaveState``.

    Args:
        config: the path of a YAML file, a dict, a ``Config``, or None for the recommended settings.
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
        Adapter.__init__(self, config, hvd.global_process_set if process_set is None else process_set, settings)
        _check_config(self._config)
        self._graphs: WeakKeyDictionary[tf.Graph, _Graph] = WeakKeyDictionary()
        self._lists: dict[Any, list[Parameter]] = {}
        self._restored = False
        self._agreed = {"config": False, "parameters": False}
        self._failure: Exception | None = None
        self._agreeing = Lock()
        # TensorFlow encodes and decodes several tensors at a time.
        self._lock = Lock()
        self._coding = 0
        self._idle_since = 0.0

    def set_config(
        self, config: str | Path | Mapping[str, Any] | Config | None = None, /, **settings: Any
    ) -> None:
        """Changes the settings from the next step on; on all ranks, between the same two steps.

        Args:
            config: a whole new config; None: the one in force, with ``settings`` in place of its own.

        Raises:
            RuntimeError: gradients are in flight.
            ConfigError: a config that cannot be used; the old one stays in force.
            ValueError: another ``min_elements``: which tensors are compressed is fixed when the graph is built.
        """
        new = Config.load(self._config if config is None else config, **settings)
        _check_config(new)
        if self._graphs and new.min_elements != self._config.min_elements:
            raise ValueError(
                f"min_elements is {self._config.min_elements} and cannot become {new.min_elements}: which tensors are "
                "compressed is part of the graph. Make a new DeepReduce and a new optimizer"
            )
        super().set_config(new)
        self._failure = None

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
        graph = self._graphs.setdefault(tensor.graph, _Graph())
        name = re.sub(r"[^A-Za-z0-9_.]", "_", tensor.name.removesuffix(":0"))
        shape = tuple(-1 if size is None else size for size in tensor.shape)
        slot = _Slot(graph, len(graph.slots), name, shape, tensor.dtype)
        slot.passes = not tensor.dtype.is_floating or -1 not in shape and np.prod(shape) < self._config.min_elements
        graph.slots.append(slot)
        # Horovod reduces no bfloat16, and a group's tensors only of one dtype: the carrier has the gradient's.
        sent = tf.float32 if tensor.dtype == tf.bfloat16 else tensor.dtype
        with tf.device("CPU:0"):
            if slot.passes:
                context = _Context(slot, tensor)
                if slot.position:
                    return tf.cast(tensor, sent), context
                # A graph's first gradient runs Python in any case, so that each step is counted.
                with tf.control_dependencies([tf.numpy_function(self._passes(slot), [], [], name="deepreduce_pass")]):
                    return tf.cast(tf.identity(tensor), sent), context
            coded = tensor.dtype if tensor.dtype == tf.float64 else tf.float32
            container, carrier = tf.numpy_function(
                self._encodes(slot), [tf.cast(tensor, coded)], [tf.uint8, coded], name="deepreduce_encode"
            )
            container.set_shape([None])
            carrier.set_shape([1])
            return tf.identity(tf.cast(carrier, sent), f"deepreduce_{name}"), _Context(slot, tensor, container)

    @plain
    def decompress(self, tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Called by Horovod with the allreduced carrier; returns the reduced gradient.

        Raises:
            ValueError: an operation that cannot be computed on compressed gradients, or another process set's.
            MismatchError: at the first gradient, where the ranks' configs differ.
        """
        self._check(tensor.op)
        if not self._agreed["config"] and self._process_set.included() and self._process_set.size() > 1:
            self._agree([])
            self._agreed["config"] = True
        gradient = ctx.gradient
        if ctx.container is None:
            return tf.cast(tensor, gradient.dtype)
        coded = gradient.dtype if gradient.dtype == tf.float64 else tf.float32
        name = f"{tensor.op.name.rsplit('/', 1)[-1]}_container_{tensor.value_index}"
        with tf.device("CPU:0"):
            gathered = hvd.allgather(
                ctx.container,
                name=name,
                ignore_name_scope=tensor.op.get_attr("ignore_name_scope"),
                process_set=self._process_set,
            )
            flat = tf.numpy_function(self._decodes(ctx.slot), [gathered, tensor], coded, name="deepreduce_decode")
        reduced = tf.cast(tf.reshape(flat, tf.shape(gradient)), gradient.dtype)
        reduced.set_shape(gradient.shape)
        return reduced

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

    def _encodes(self, slot: _Slot) -> Callable[[Floats], tuple[U8, Floats]]:
        def encode(gradient: Floats) -> tuple[U8, Floats]:
            parameter = self._begin(slot)
            with self._coded("encode", slot):
                flat = np.asarray(gradient).reshape(-1)
                slot.numel = flat.size
                packed = self._encode(parameter, flat)
            carrier = np.ones(1, flat.dtype)
            self._stats.sending(packed.size + min(slot.dtype.size, 8), flat.size * slot.dtype.size)
            return packed, carrier

        return encode

    def _decodes(self, slot: _Slot) -> Callable[[U8, Floats], Floats]:
        def decode(gathered: U8, carrier: Floats) -> Floats:
            parameter = self._parameter(slot)
            with self._coded("decode", slot):
                out: Floats = np.empty(slot.numel, np.float64 if slot.dtype == tf.float64 else np.float32)
                try:
                    self._decode(gathered, out, float(carrier[0]))
                except Exception as error:
                    # An error ends TensorFlow's step at once, and the other ranks would wait for what has not been
                    # sent by then. It is the same on every rank, so all can raise it at the end of the step.
                    out[:] = 0
                    slot.graph.failure = slot.graph.failure or error
            self._in_flight.discard(parameter.name)
            self._end(slot)
            return out

        return decode

    def _passes(self, slot: _Slot) -> Callable[[], None]:
        def passing() -> None:
            self._begin(slot)
            self._end(slot)

        return passing

    def _begin(self, slot: _Slot) -> Parameter:
        """A gradient has come; before the first of all goes anywhere, the ranks compare their models."""
        with self._lock:
            parameter = self._parameter(slot)
            if not self._agreed["parameters"]:
                self._agree(self._described())
                self._agreed["parameters"] = True
            graph = slot.graph
            if slot.position in graph.begun:  # the step before this was broken off
                graph.begun.clear()
                graph.ended, graph.failure = 0, None
            if not graph.begun:
                self._stats.step_began()
                self._stats.sending(*graph.passing())
            graph.begun.add(slot.position)
        return parameter

    def _end(self, slot: _Slot) -> None:
        with self._lock:
            graph = slot.graph
            graph.ended += 1
            if graph.ended < graph.coded:
                return
            failure = graph.failure
            graph.begun.clear()
            graph.ended, graph.failure = 0, None
            self._stats.step_ended()
        if failure is not None:
            raise failure

    @contextmanager
    def _coded(self, what: str, slot: _Slot) -> Iterator[None]:
        """Times its body; and, once the whole step is encoded, the time in which there was nothing to do."""
        now = time.perf_counter()
        with self._lock:
            if what == "decode" and not self._coding and len(slot.graph.begun) == slot.graph.coded:
                self._stats.took("wait", now - self._idle_since)
            self._coding += 1
        try:
            with self._stats.timed(what):
                yield
        finally:
            with self._lock:
                self._coding -= 1
                self._idle_since = time.perf_counter()

    def _parameter(self, slot: _Slot) -> Parameter:
        """The parameter of a slot; by now, its graph is complete."""
        graph = slot.graph
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
        return graph.parameters[slot.position]

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


def _check_config(config: Config) -> None:
    """Refuses what sends several tensors as one: a graph has no moment at which all of a step's gradients are there."""
    if config.scope != "tensor" or config.exchange != AllGather():
        raise ConfigError(
            f"scope is {config.scope!r} and exchange {config.exchange.name!r}; TensorFlow has scope 'tensor' and "
            "exchange 'allgather' alone"
        )


def _signature(parameters: list[Parameter]) -> tuple[tuple[tuple[int, ...], str], ...]:
    return tuple((parameter.shape, parameter.dtype) for parameter in parameters)


def _other_model(signature: Any, lists: Any) -> ValueError:
    def shown(one: Any) -> str:
        return ", ".join(f"{dtype} {list(shape)}" for shape, dtype in one[:8]) + (", ..." if len(one) > 8 else "")

    return ValueError(
        f"the state is of another model: its gradients are {' or '.join(map(shown, lists))}, and here they are "
        f"{shown(signature)}"
    )
