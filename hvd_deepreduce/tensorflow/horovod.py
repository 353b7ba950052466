r"""The adapter for stock Horovod on TensorFlow and Keras.

Horovod calls ``compress(gradient)`` and ``decompress(output, context)`` while TensorFlow traces a function, also for
the eager tape. So both only add operations to the graph:

    gradient -> put ----> carrier -> hvd.allreduce -> take -> reduced gradient
                 | into the bucket                     ^ from the bucket
                 \-> a full bucket -> other threads -> its sum is there

put and take are operations in C++, or Python functions where those were not built or the gradients are on a GPU. The
carrier has the single element 1.0; Horovod turns it into the factor by which it would have scaled the gradient, as in
the PyTorch adapter. In scope ``tensor`` each gradient of a bucket has a container of its own.

The modules: ``graph`` knows the gradients of each graph, ``operations`` the operations, which ``native`` or
``python_unit`` runs, ``indexed_slices`` those of sparse gradients; ``handshake`` compares the ranks. What happens when
the operations run is in ``engine/graph``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow.compression import Compressor
from tensorflow.python.ops import control_flow_util

from hvd_deepreduce.config import Config, ConfigError
from hvd_deepreduce.engine import ElasticState, Snapshot, small
from hvd_deepreduce.engine.compression import Compression
from hvd_deepreduce.engine.graph.buckets import GraphBuckets
from hvd_deepreduce.engine.graph.parameters import GraphEngine, Variables
from hvd_deepreduce.engine.graph.slots import Graph, Slot
from hvd_deepreduce.engine.pipelines import Pipelines
from hvd_deepreduce.engine.state import Reshard, State
from hvd_deepreduce.exchange.settings import AutoExchange
from hvd_deepreduce.tensorflow import indexed_slices, optimizers
from hvd_deepreduce.tensorflow.checkpoint import Restorable
from hvd_deepreduce.tensorflow.collectives import TensorFlowCollectives
from hvd_deepreduce.tensorflow.graph import Graphs, add_slot, at_end, current_place
from hvd_deepreduce.tensorflow.handshake import Handshake
from hvd_deepreduce.tensorflow.native import library
from hvd_deepreduce.tensorflow.operations import Operations

LINE = 'optimizer = hvd.DistributedOptimizer(optimizer, compression=DeepReduce("recommended"))'
XLA = (
    "XLA cannot compile a function with operations of Horovod and DeepReduce. Turn XLA off: "
    "tf.function(jit_compile=False), model.compile(..., jit_compile=False)"
)
# Autograph has nothing to convert in these methods.
plain = tf.autograph.experimental.do_not_convert


def _checked(config: Config, variables: Variables | None) -> Config:
    if config.overrides and variables is None:
        raise ConfigError(
            "overrides matches the names of variables, and Horovod does not tell them: give DeepReduce the variables "
            "whose gradients it gets, DeepReduce(..., variables=model.trainable_variables)"
        )
    if config.mode == "auto" and (library() is None or tf.config.list_logical_devices("GPU")):
        raise ConfigError(
            "mode is 'auto', which needs the operations in C++: install hvd_deepreduce again, where this TensorFlow "
            f"({tf.__version__}) and a C++ compiler are there; they run on the host only, not in a process with a GPU. "
            "Or set mode to 'always'"
        )
    return config.for_gradients()


@dataclass(eq=False)
class _Context:
    """What ``decompress`` needs from ``compress``.

    Attributes:
        number: of the graph's run, a tensor.
    """

    slot: Slot
    gradient: tf.Tensor
    number: tf.Tensor


class DeepReduce(Compression, Compressor, Restorable):  # type: ignore[misc]
    """Compresses gradients to a few percent of their bytes. For ``compression=`` of Horovod's tape and optimizers.

    Works with ``hvd.DistributedGradientTape``, ``hvd.DistributedOptimizer`` and ``hvd.keras.DistributedOptimizer``, in
    eager mode, tf.function and ``model.fit``; op Average and Sum, groups, backward_passes_per_step, sparse_as_dense,
    loss scaling and process_set. One DeepReduce for each model; all ranks must create it with the same config.

    IndexedSlices, as of an embedding, stay sparse. With every exchange but those over MPI, and the sparsifiers
    ``nonzero``, ``topk``, ``topk_capped`` and ``threshold`` each has a container of its own, in every scope; under
    other settings, and in a function without any dense gradient, Horovod sends them uncompressed.

    It can be added to a ``tf.train.Checkpoint``: its residuals and step counts are then saved and restored with the
    rest. Ranks differ, so each rank must write its own checkpoint; for Keras, see ``SaveState``.

    Horovod keeps every DeepReduce of a tape or optimizer until the process ends. ``close()``, or
    ``with DeepReduce(...) as compression:``, ends its threads and communicators and frees its residuals.

    Args:
        config: a preset's name, the path of a YAML file, a dict, a ``Config``, or None for the default for SGD.
        process_set: that of the tape or optimizer, if it has one.
        variables: those whose gradients Horovod gets, in its order, such as ``model.trainable_variables``. Their names
            are what the config's ``overrides`` match, and nothing else needs them.
        **settings: keys of the config, in place of its own.

    Raises:
        TypeError: a model or an optimizer was given, as on PyTorch.
        ConfigError: the config cannot be used.
    """

    def __init__(
        self,
        config: str | Path | Mapping[str, Any] | Config | None = None,
        *others: object,
        process_set: Any = None,
        variables: Iterable[tf.Variable] | None = None,
        **settings: Any,
    ) -> None:
        if others or not isinstance(config, str | Path | Mapping | Config | None):
            raise TypeError(
                f"DeepReduce was given {', '.join(type(one).__name__ for one in (config, *others))}. On TensorFlow its "
                "only positional argument is the config: it needs no model, because it identifies a gradient by its "
                f"position in the graph. Write: {LINE}"
            )
        collectives = TensorFlowCollectives(process_set)
        self._process_set = collectives.process_set
        known = None if variables is None else Variables(variables)
        self._engine = GraphEngine(_checked(Config.load(config, **settings), known), collectives, known)
        self._engine.auto_over_mpi = False  # its queues are made while functions are traced, before the model is known
        self._graphs = Graphs()
        self._pipelines: Pipelines | None = None
        self._variables = known
        self._buckets = GraphBuckets(self._engine, lambda: self._handshake.number)
        self._handshake = Handshake(self._engine, collectives, self._graphs, self._buckets.steps)
        self._operations = Operations(self._engine, collectives, self._buckets, self._handshake)

    def _change(self, new: Config) -> None:
        # Which operations a graph has depends on some settings.
        old, new = self.config, _checked(new, self._variables)
        for fixed in ("mode", "scope", "min_elements"):
            before, after = getattr(old, fixed), getattr(new, fixed)
            larger = fixed != "mode" and "tensor" not in (old.scope, new.scope)
            if self._graphs.all() and before != after and not larger:
                raise ValueError(
                    f"{fixed} is {before!r} and cannot be changed to {after!r} now, because it determines which "
                    "operations the graph has: create a new DeepReduce and a new optimizer"
                )
        self._engine.set_config(new)
        self._handshake.forget_failure()
        if isinstance(self.config.exchange, AutoExchange):
            self._handshake.repeat()
        if self._graphs.all() and self._handshake.configs_agree:
            try:
                self._prepare_exchange(self._graphs.queues)
            except RuntimeError:
                self._engine.set_config(old)
                raise

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals, as NumPy arrays, and step counts. Ranks differ: each saves and loads its own."""
        self._check_early()
        return self._engine.state_dict()

    def _load(self, state: State, reshard: Reshard) -> None:
        with self._buckets.steps.lock:
            self._engine.load_state_dict(state, reshard=reshard)
            self._handshake.forget_failure()

    def close(self) -> None:
        """Ends its threads and exchanges, and frees the residuals.

        Every rank calls it after the same step, before ``hvd.shutdown()``. It can be called more than once. Afterwards
        ``config`` and ``stats()`` can be read; everything else raises ``RuntimeError``, and functions that were traced
        with it raise ``tf.errors.OpError``. Save the state before.
        """
        self._handshake.close()
        self._engine.close()
        self._buckets.close()

    def rewind(self, snapshot: Snapshot) -> None:
        with self._buckets.steps.lock:
            self._buckets.forget_all(self._graphs.all())
            self._engine.rewind(snapshot)
            self._handshake.repeat()

    def elastic_state(self) -> ElasticState:
        small_under = None if self._pipelines is None else self._pipelines.default.config.shared()
        return super().elastic_state()._replace(small_under=small_under)

    def sync_from_root(self, told: ElasticState) -> None:
        self.rewind(self._engine.state_from_root(told))
        self._handshake.greets = False
        if self._pipelines is None and told.small_under is not None:
            self._pipelines = Pipelines(Config.load(told.small_under), threads=1)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a DeepReduce cannot be pickled, because its residuals belong to their rank. For an elastic job, use the "
            "states of hvd_deepreduce.tensorflow.elastic, such as KerasState(model, compression=compression)"
        )

    @plain  # type: ignore[untyped-decorator]
    def compress(self, tensor: tf.Tensor | None = None) -> tuple[tf.Tensor, Any]:
        """Called by Horovod with a gradient; returns what Horovod allreduces, and the context for ``decompress``.

        Raises:
            TypeError: the class was given as ``compression=``, not an instance.
            ValueError: the gradient has not the shape and dtype of the variable in its place.
            RuntimeError: in a function that XLA compiles, or outside of a graph; or ``close`` was called.
        """
        if tensor is None:
            raise TypeError(f"compression= was given the class DeepReduce; it must be an instance. Write: {LINE}")
        self._engine.check_open()
        if tf.executing_eagerly():
            raise RuntimeError(
                "DeepReduce identifies a gradient by its position in a graph, but this tensor is not in a graph: use "
                "hvd.DistributedGradientTape or hvd.DistributedOptimizer, or call hvd.allreduce within a tf.function"
            )
        if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            raise RuntimeError(XLA)
        place, scope = current_place()
        if self._process_set.included():
            self._handshake.enroll()
        # Ranks may trace a function again at different steps, before or after a change of the config.
        self._pipelines = self._pipelines or self._engine.pipelines
        graph, new = self._graphs.of(place)
        if new:
            at_end(place, lambda: self._end(graph, place))
        graph.scopes.add(scope)
        self._find_slices(graph, place)
        slot = add_slot(graph, tensor, tensor.shape)
        try:
            name = "" if self._variables is None else self._variables.name_of(slot)
        except ValueError:
            self._handshake.withdraw()
            raise
        tiny = small.uncompressed(self._pipelines.of(name), slot.numel, slot.sent_itemsize)
        slot.uncompressed = tiny or not slot.dtype.is_floating
        graph.compressed += not slot.uncompressed
        # Horovod does not reduce bfloat16, and a group's tensors must have one dtype: the carrier has the gradient's.
        sent = tf.float32 if tensor.dtype == tf.bfloat16 else tensor.dtype
        with tf.device("CPU:0"):
            number = self._operations.count_runs(slot.graph, place)
            context = _Context(slot, tensor, number)
            if slot.uncompressed:
                # After an error of the step check, no rank may wait for what others have not started.
                with tf.control_dependencies([number]):
                    return tf.identity(tf.cast(tensor, sent)), context
            self._graphs.join_unit(slot, tensor, place)
            return self._operations.put(slot, tensor, number, sent), context

    @plain  # type: ignore[untyped-decorator]
    def decompress(self, tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Called by Horovod with the allreduced carrier; returns the reduced gradient.

        Raises:
            ValueError: an operation that cannot be computed on compressed gradients, or another process set's.
            MismatchError: at the first gradient, where the ranks' configs differ.
            RuntimeError: an exchange over MPI in a job without MPI.
        """
        try:
            self._check(tensor.op)
        except ValueError:
            self._handshake.withdraw()
            raise
        slot, gradient = ctx.slot, ctx.gradient
        slot.graph.built += 1
        if not self._handshake.configs_agree and self._process_set.included():
            self._handshake.compare_configs()
        if slot.uncompressed:
            return tf.cast(tensor, gradient.dtype)
        with tf.device("CPU:0"):
            self._prepare_exchange(slot.unit.queue + 1)
            return self._operations.take(slot, tensor, ctx.number, gradient)

    def _find_slices(self, graph: Graph, place: tf.Graph) -> None:
        """Makes slots for the IndexedSlices that have come into the graph since the last call."""
        found = indexed_slices.find(place, graph.searched, graph.scopes)
        graph.searched = len(place.get_operations())
        graph.slices += [(one, add_slot(graph, one.own.values, one.shape)) for one in found]

    def _end(self, graph: Graph, place: tf.Graph) -> None:
        """Adds operations at the end of tracing: one that reads all results, and those of IndexedSlices."""
        self._operations.read_all(graph, place)
        optimizers.find(self._engine)
        self._find_slices(graph, place)
        slices, graph.slices = graph.slices, []
        if graph.built + len(slices) < len(graph.slots):
            return  # an error has ended it
        graph.built += len(slices)
        if not slices or not self._operations.exchanges:
            return
        with tf.device("CPU:0"):
            number = self._operations.count_runs(graph, place)
            engine, steps = self._engine, self._buckets.steps
            if engine.exchange.containers:
                graph.compressed += len(slices)
                for one, slot in slices:
                    indexed_slices.compress(one, slot, number, engine, steps)
            else:
                indexed_slices.count([one for one, _ in slices], graph, number, engine, steps)

    def _prepare_exchange(self, queues: int) -> None:
        """Creates so many queues for exchanges over MPI, on all ranks at the same time."""
        if self._process_set.included():
            self._engine.exchange.prepare(queues)

    def _check(self, operation: tf.Operation) -> None:
        """Whether this operation's result can be computed from compressed gradients."""
        if operation.type not in ("HorovodAllreduce", "HorovodGroupedAllreduce"):
            raise ValueError(
                f"DeepReduce compresses gradients for hvd.allreduce and hvd.grouped_allreduce, but was given to a "
                f"{operation.type}: leave compression= out there"
            )
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
