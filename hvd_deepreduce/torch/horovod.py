"""The adapter for stock Horovod on PyTorch.

Horovod calls ``compress(gradient)``, allreduces the result under the parameter's name, and calls
``decompress(output, context)``. So ``compress`` starts the gradient's exchange and returns a carrier: a tensor with the
single element 1.0. Horovod turns it into the factor by which it would have scaled the gradient (1 for Average, the
number of ranks for Sum, whatever the options), and ``decompress`` applies it to the mean of the containers.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch.compression import Compressor

from hvd_deepreduce.codecs.sparse_tensor import MAX_NUMEL
from hvd_deepreduce.config import Config
from hvd_deepreduce.engine import Device, ElasticState, Engine, Parameter, Reducer, Snapshot, Ticket, adaptive
from hvd_deepreduce.engine.compression import Compression
from hvd_deepreduce.engine.small import CARRIER_BYTES
from hvd_deepreduce.engine.state import Reshard, State
from hvd_deepreduce.engine.ticket import in_flight
from hvd_deepreduce.exchange import traffic
from hvd_deepreduce.horovod import SAME_STEPS
from hvd_deepreduce.torch import sparse
from hvd_deepreduce.torch.collectives import TorchCollectives, as_it_is, wire_device
from hvd_deepreduce.torch.dense import Rest, as_it_came, flush
from hvd_deepreduce.torch.owners import ADASUM, Owners, no_instance
from hvd_deepreduce.torch.states import as_tensors, on_host
from hvd_deepreduce.torch.tensors import TorchTensors, hashes

LATE = (
    "parameters were unfrozen (requires_grad), or given to the optimizer, after hvd.DistributedOptimizer was made: "
    "{names}. Horovod does not reduce their gradients, so the ranks' parameters would differ from this step on; it was "
    "not applied. Make DeepReduce and the optimizer while all parameters that will ever be trained are trainable, and "
    "freeze them afterwards: Horovod reduces zeros for those. Or delete both, and the last loss, whose graph refers to "
    "the optimizer, and make them again"
)

BROADCAST = (
    "Before the first step, call hvd.broadcast_parameters(model.state_dict(), root_rank=0), with process_set= if "
    "DeepReduce has one; or load the same checkpoint on all ranks"
)
_IS_TRAINED, _DEVICE, _PARAMS = attrgetter("requires_grad"), attrgetter("device"), itemgetter("params")
_models: weakref.WeakKeyDictionary[DeepReduce, set[int]] = weakref.WeakKeyDictionary()
"""Ids of the parameters of each DeepReduce of this process, also of closed ones."""
INSTEAD = (
    'write optimizer = LocalSGD(optimizer, model, "adamw_safe") in place of hvd.DistributedOptimizer, and '
    "optimizer.sync() at the end"
)


class DeepReduce(Compression, Compressor):  # type: ignore[misc]
    """Compresses gradients to a few percent of their bytes. For ``compression=`` of ``hvd.DistributedOptimizer``.

    Works with op Average and Sum, gradient_predivide_factor, groups, backward_passes_per_step, sparse_as_dense and
    process_set, under horovodrun (MPI or Gloo) and mpirun. All ranks must create it with the same config and model.

    Sparse gradients, as of ``nn.Embedding(sparse=True)``, stay sparse. Their containers are sent in scope ``tensor``,
    with the sparsifiers ``nonzero``, ``topk``, ``topk_capped`` and ``threshold``; under other settings Horovod sends
    them uncompressed. Between backward() and synchronize(), such a ``grad`` is a carrier and not the gradient.

    Its threads and communicators end, and its residuals are freed, when Python deletes it, and at the latest when the
    process ends. ``close()``, or ``with DeepReduce(...) as compression:``, does that at once.

    Args:
        model: the module that is trained, or its ``named_parameters()``: Horovod does not say which parameter a
            gradient belongs to.
        config: a preset's name, the path of a YAML file, a dict, a ``Config``, or None for the default for SGD.
        process_set: the optimizer's, if it has one.
        **settings: keys of the config, in place of its own.

    Raises:
        TypeError: no model was given.
        ValueError: two parameters have the same name.
        ConfigError: the config cannot be used.
    """

    def __init__(
        self,
        model: torch.nn.Module | Iterable[tuple[str, torch.Tensor]] | None = None,
        config: str | Path | Mapping[str, Any] | Config | None = None,
        *,
        process_set: Any = None,
        **settings: Any,
    ) -> None:
        self._owners = owners = Owners(model)
        own = {id(tensor) for tensor in owners.tensors.values()}
        if any(not own.isdisjoint(ids) for ids in _models.values()):
            # An optimizer that was deleted, to be made again, lives on in a cycle with its hooks, and would go on
            # reducing gradients under the same names. An error's traceback may hold the graph, which holds the hooks:
            # the second call frees these.
            gc.collect()
            gc.collect()
        _models[self] = own
        # By optimizer: ids of the parameters that were trainable at its first step, and when it was checked last.
        self._first_trained: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()
        self._checked: weakref.WeakKeyDictionary[Any, tuple[list[int], list[bool]]] = weakref.WeakKeyDictionary()
        self._handles: list[Any] = []
        self._hooked = [tensor for tensor in owners.tensors.values() if tensor.requires_grad]
        self._hook()
        self._remove_hooks = weakref.finalize(self, _remove, self._handles)
        self._remove_hooks.atexit = False
        self._carriers: dict[str, torch.Tensor] = {}
        self._ones = torch.ones(len(owners.parameters), dtype=torch.float64)  # the carriers on the host
        self._sparse: dict[torch.Tensor, int] = {}
        self._sent_alone: set[str] = set()
        self._rest = Rest(as_it_is)
        # Of the step that is under way: what is counted at its end.
        self._carriers_sent, self._dense_bytes = 0, 0
        self._carried: dict[int, sparse.SparseTicket] = {}
        self._optimizers: weakref.WeakSet[Any] | None = None  # those known; None: not searched for yet
        self._met = False  # in the step that is under way
        self._reduced: set[str] = set()
        # The parameters that Horovod reduces, and by what they were found: these are asked for at each step.
        self._found: list[tuple[Parameter, Device]] = []
        self._found_by: tuple[Any, ...] = ()
        # In scope ``tensor``: the names of those that are too small to be compressed, under the engine's generation.
        self._small: frozenset[str] = frozenset()
        self._small_in = -1
        self._tensors = TorchTensors()
        self._collectives = TorchCollectives(self._tensors, process_set)
        # Whether a new rank may come without a word: it waits for the others at its first gradient, whatever that is.
        self._greets = self._collectives.elastic()
        self._engine = Engine(Config.load(config, **settings).for_gradients(), self._collectives, owners.parameters)
        self._reducer = Reducer(
            self._engine, self._tensors, self._trained, excluded=self._is_apart, busy=torch.get_num_threads
        )
        self._trained()  # notes which parameters Horovod will reduce
        self._send_tables_alone()

    def _change(self, new: Config) -> None:
        self._come_back()
        self._engine.set_config(new)

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals, as tensors, and step counts. Ranks differ: each saves and loads its own."""
        state = self._engine.state_dict()
        return as_tensors(state)

    def _load(self, state: State, reshard: Reshard) -> None:
        if reshard is False:
            state = on_host(state)
        elif isinstance(state, Iterable) and not isinstance(state, Mapping):
            state = map(on_host, state)
        self._come_back()
        self._reducer.settle()
        self._engine.load_state_dict(state, reshard=reshard)
        self._carried.clear()
        self._met = False

    def rewind(self, snapshot: Snapshot) -> None:
        self._come_back()
        self._reducer.settle()
        self._engine.rewind(snapshot)
        self._carried.clear()
        self._met = False

    def sync_from_root(self, told: ElasticState) -> None:
        self._greets = False
        self.rewind(self._engine.state_from_root(told))

    def close(self) -> None:
        """Ends its threads and exchanges, removes its hooks from the model, and frees the residuals.

        Every rank calls it after the same step, before ``hvd.shutdown()``. It can be called more than once. Afterwards
        ``config`` and ``stats()`` can be read; everything else raises ``RuntimeError``. Save the state before.
        """
        self._come_back()
        self._reducer.settle()
        self._engine.close()
        self._remove_hooks()
        # Horovod's optimizer may keep this object alive: let go of the model and of the buckets.
        self._owners.forget()
        self._sparse, self._carried, self._carriers = {}, {}, {}
        self._reducer = Reducer(self._engine, self._tensors, self._trained)

    def compress(self, tensor: torch.Tensor | None = None) -> tuple[torch.Tensor, Any]:
        """Called by Horovod with a gradient; returns what Horovod allreduces, and the context for ``decompress``.

        Args:
            tensor: of any shape and dtype. It is sent uncompressed if it is sparse or not floating-point, or, in scope
                ``tensor``, if it is small (``min_elements``). Horovod passes no sparse gradients but those of groups:
                it sends the others by itself, and they have been replaced by carriers (torch/sparse.py).

        Returns:
            The carrier, float64 ``[1]``, or the uncompressed gradient; and the context.

        Raises:
            TypeError: the class was given as ``compression=``, not an instance.
            ValueError: the tensor is not the gradient of a parameter of the model.
            MismatchError: at the first gradient, if the ranks do not agree.
            RuntimeError: the parameter's last gradient, or its last bucket, is still in flight; or an exchange over MPI
                in a job without MPI; or ``close`` was called.
        """
        if tensor is None:
            raise no_instance()
        if self._rest.begun:
            return self._rest.compress(tensor)
        engine = self._engine
        if engine.closed:
            engine.check_open()
        if engine.stats.idle:
            engine.begin_step()
        if tensor.is_sparse:
            return tensor, None  # decompress counts it
        dense_bytes = tensor.numel() * tensor.element_size()
        if not tensor.is_floating_point():
            engine.count_allreduce(dense_bytes, dense_bytes)
            return tensor, None
        parameter, own = self._owners.find(tensor, engine.in_flight)
        if self._small_in != engine.generation:
            self._find_small()
        # Whether it is sent whole: it is small, or the step is dense.
        whole = parameter.name in self._small or (engine.choice is not None and engine.dense)
        if not self._met and (self._meets_first or not whole):
            self._meet()
            whole = parameter.name in self._small or (engine.choice is not None and engine.dense)
        if whole:
            if engine.to_flush(parameter):
                flush(engine, self._tensors, parameter, tensor)
            sent, copied = as_it_is(tensor)
            engine.count_allreduce(sent.numel() * sent.element_size(), dense_bytes)
            return sent, copied
        ticket = self._reducer.start(parameter, tensor, own)
        self._carriers_sent += 1
        self._dense_bytes += traffic.allreduce(dense_bytes, engine.ranks).sent
        carrier = self._carriers.get(parameter.name)
        if carrier is None or carrier.is_cuda or tensor.is_cuda:
            carrier = self._carrier(parameter, tensor)
        return carrier, ticket

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Called by Horovod with the allreduced carrier; returns the reduced gradient, in the gradient's own memory.

        Raises:
            ContainerError: a container cannot be decoded; names its rank.
            MismatchError: the ranks' configs differ.
            RuntimeError: ``close`` was called.
        """
        if self._rest.begun:
            return as_it_came(tensor, ctx)
        engine = self._engine
        try:
            if engine.closed:
                engine.check_open()
            if isinstance(ctx, Ticket):
                tensor = self._reducer.finish(ctx, float(tensor) / engine.ranks)
            elif tensor.is_sparse:
                self._count_sparse(tensor)
                tensor = self._finish_sparse(tensor)
            else:
                tensor = as_it_came(tensor, ctx)
        except Exception:
            self._complete()
            raise
        if not engine.in_flight:
            if self._carriers_sent:
                self._count_carriers()
            engine.stats.end_step()
            self._met = False
        return tensor

    def _complete(self) -> None:
        """After an error that comes when the backward pass is over: waits until all that this rank has started in this
        step is complete on all ranks, whose backward passes may not be over. Other errors are not raised.

        This rank may call ``hvd.join()`` now. Horovod would count it twice for what it still has in flight, and run
        that on ranks that have not started it yet: these crash.
        """
        self._reducer.complete()
        self._collectives.complete()
        for optimizer in list(self._first_trained) or sparse.optimizers_of(self):
            for handle, _ in list(optimizer._handles.values()):
                with suppress(Exception):
                    handle() if callable(handle) else hvd.synchronize(handle)
            # As at the end of Horovod's synchronize(): the rank may go on, and come to the next meeting.
            optimizer._handles.clear()
            optimizer._allreduce_delay.update(
                dict.fromkeys(optimizer._allreduce_delay, optimizer.backward_passes_per_step)
            )
            optimizer._group_counts.update(dict.fromkeys(optimizer._group_counts, 0))
        self._carried.clear()
        self._engine.forget()
        self._engine.stats.end_step()
        self._met = False

    def _count_carriers(self) -> None:
        """Counts a step's carriers, and the gradients that they stand for, at once."""
        one = traffic.allreduce(CARRIER_BYTES, self._engine.ranks)
        sent = self._carriers_sent
        self._engine.stats.add(wire=traffic.Traffic(sent * one.sent, sent * one.received), dense=self._dense_bytes)
        self._carriers_sent = self._dense_bytes = 0

    def check_optimizer(self, optimizer: Any) -> None:
        """Called before each step of ``hvd.DistributedOptimizer``, which shows DeepReduce only what it reduces: with
        one rank nothing, and never a parameter that it does not know.

        Raises:
            ValueError: Adasum, or a parameter of another model; or an optimizer with momentum under the memory ``dgc``.
            RuntimeError: a parameter was unfrozen, or given to the optimizer, after that was made; or ``close`` was
                called.
        """
        engine = self._engine
        if engine.closed:
            engine.check_open()
        if engine.choice is not None:
            self._step_aside()
        if self._optimizers is not None:
            self._optimizers.add(optimizer)
        if getattr(optimizer, "op", hvd.Adasum) == hvd.Adasum:  # its own class has none
            raise ValueError(f"the optimizer has {ADASUM}")
        if engine.has_velocity:
            self._check_momentum(optimizer)
        every = list(chain.from_iterable(map(_PARAMS, optimizer.param_groups)))
        seen = list(map(id, every)), list(map(_IS_TRAINED, every))  # hashing tensors takes long
        if self._checked.get(optimizer) == seen:
            return
        trained = [parameter for parameter in every if parameter.requires_grad]
        numbers = [id(parameter) for parameter in trained]
        for parameter in trained:
            if self._owners.of(parameter) is None:
                raise self._owners.unknown(parameter)
        # With one rank Horovod registers nothing: those of the first step, then.
        first = self._first_trained.setdefault(optimizer, set(numbers))
        reduced = {id(one) for one in optimizer._requires_update} or first
        late = [self._owners.named(one).name for one in trained if id(one) not in reduced]
        if late:
            optimizer.synchronize()  # nothing stays in flight
            raise RuntimeError(LATE.format(names=", ".join(late[:5]) + ", ..." * (len(late) > 5)))
        adaptive.look_at(engine, optimizer, INSTEAD)
        self._checked[optimizer] = seen

    def _step_aside(self) -> None:
        """Before each step of an optimizer: with ``mode: auto``, while steps are dense for certain and nothing waits in
        a residual, Horovod's calls pass by, and this object takes no time."""
        engine, rest = self._engine, self._rest
        if rest.left:
            rest.count(engine)
            if not rest.left:
                self._come_back()
        elif engine.choice is not None and not self._sent_alone and len(self._checked) == 1:
            certain = 0 if engine.failed or self._collectives.elastic() else engine.choice.certain()
            if certain and not any(map(engine.to_flush, engine.parameters.values())):
                rest.begin(engine, certain)
                _remove(self._handles)

    def _come_back(self) -> None:
        """Ends what ``_step_aside`` has begun."""
        if self._rest.begun:
            self._rest.end(self._engine)
            self._hook()

    def _hook(self) -> None:
        """Notes from now on which gradient came last."""
        note = _noting_latest(weakref.ref(self))
        for tensor in self._hooked:
            self._handles.append(tensor.register_post_accumulate_grad_hook(note))  # type: ignore[no-untyped-call]

    def _check_momentum(self, optimizer: Any) -> None:
        """Under the memory ``dgc`` the momentum is applied before the residual, and must not be applied again."""
        for group in optimizer.param_groups:
            for key in ("momentum", "betas"):
                if group.get(key):
                    raise ValueError(
                        f"memory is 'dgc', which applies momentum on each rank, and the optimizer has {key}="
                        f"{group[key]}, so that it would be applied twice: use torch.optim.SGD without momentum, and "
                        "set the momentum in the config, as memory={'name': 'dgc', 'momentum': 0.9}"
                    )

    def _came(self, tensor: torch.Tensor) -> None:
        """A sparse gradient came: starts its exchange, if Horovod is about to send it, and notes its bytes, since
        Horovod shows only the ranks' sum."""
        gradient = tensor.grad
        process_set = self._collectives.process_set
        if gradient is not None and process_set.included() and process_set.size() > 1:
            self._engine.begin_step()
            self._start_sparse(tensor, gradient)
            assert tensor.grad is not None
            self._sparse[tensor] = _coo_bytes(tensor.grad)
            self._send_alone(tensor)

    def _is_apart(self, parameter: Parameter) -> bool:
        """Whether the parameter's gradients are in no bucket: they are sparse, or too small to be compressed."""
        if self._small_in != self._engine.generation:
            self._find_small()
        return parameter.name in self._sent_alone or parameter.name in self._small

    def _send_tables_alone(self) -> None:
        """Forgets which parameters have had sparse gradients; those of PyTorch's embeddings are known."""
        self._sent_alone.clear()
        modules = self._owners.model.modules() if self._owners.model is not None else ()
        for tensor in sparse.tables(modules):
            self._send_alone(tensor)

    def _send_alone(self, tensor: torch.Tensor) -> None:
        """Leaves a parameter with sparse gradients out of the buckets of later steps."""
        parameter = self._owners.of(tensor)
        if parameter is not None:
            self._sent_alone.add(parameter.name)

    def _start_sparse(self, tensor: torch.Tensor, gradient: torch.Tensor) -> None:
        """Sends a sparse gradient and puts a carrier in its place, if Horovod sends it after this backward pass."""
        engine = self._engine
        parameter = self._owners.named(tensor)
        if not self._met and self._meets_first and self._sends(tensor):
            self._meet()
        if (
            engine.dense
            or not engine.takes_sparse(parameter)
            or parameter.name not in self._sent_alone  # in a bucket of this step
            or not gradient.is_floating_point()
            or not 0 < gradient.numel() <= MAX_NUMEL
            or parameter.number >= sparse.MOST
            or self._is_small(parameter)
            or not self._sends(tensor)
        ):
            return
        if parameter.name in engine.in_flight:
            raise in_flight(parameter)
        if not self._met:
            self._meet()
        with engine.stats.span("encode", parameter.name):
            key = engine.key(parameter)
            flat = sparse.flattened(gradient)
            packed = engine.encode_sparse(parameter, flat)
        pending = engine.collectives.start_allgather(packed, parameter.name)
        tensor.grad = sparse.carrier(gradient, parameter.number)
        like = torch.zeros_like(gradient)
        self._carried[parameter.number] = sparse.SparseTicket(
            parameter, key, pending, (flat.numel, flat.values.dtype), like
        )

    def _sends(self, tensor: torch.Tensor) -> bool:
        """Whether Horovod's hook, which runs next, sends the parameter's gradient as it is."""
        if self._optimizers is None:
            self._optimizers = weakref.WeakSet(sparse.optimizers_of(self))
        owner = next((one for one in self._optimizers if tensor in one._requires_update), None)
        if owner is None or owner.sparse_as_dense or owner._groups is not None:
            return False
        return bool(owner._allreduce_delay[tensor] == 1)

    def _finish_sparse(self, gathered: torch.Tensor) -> torch.Tensor:
        """The reduced gradient whose carriers Horovod has gathered; other sparse gradients as they are."""
        engine = self._engine
        read = sparse.read_carriers(gathered, engine.collectives.size()) if self._carried else None
        ticket = None if read is None else self._carried.pop(read[0], None)
        if read is None or ticket is None:
            return gathered
        with engine.stats.span("wait", ticket.parameter.name):
            packed = engine.collectives.wait_allgather(ticket.pending)
        with engine.stats.span("decode", ticket.parameter.name):
            total = engine.decode_sparse(ticket.parameter, packed, *ticket.flat, read[1], ticket.key)
            with engine.receiving():
                result = sparse.unflattened(total, ticket.like)
        return result

    def _count_sparse(self, total: torch.Tensor) -> None:
        """Counts a gradient that Horovod has gathered. Gradients of one shape may be taken for each other: it is their
        sum that matters."""
        ranks = self._engine.collectives.size()
        size = _coo_bytes(total)
        known = next((tensor for tensor in self._sparse if tensor.shape == total.shape), None)
        own = size // ranks if known is None else self._sparse.pop(known)
        dense = traffic.allreduce(total.numel() * total.element_size(), ranks).sent
        self._engine.stats.add(wire=traffic.allgather(own, size, ranks), dense=dense)

    def _find_small(self) -> None:
        """Finds the parameters whose gradients are sent uncompressed."""
        tensors, engine = self._owners.tensors, self._engine
        self._small = frozenset(filter(lambda name: self._is_small(engine.parameters[name]), tensors))
        self._small_in = engine.generation

    def _is_small(self, parameter: Parameter) -> bool:
        tensor = self._owners.tensors[parameter.name]
        itemsize = 4 if tensor.dtype == torch.bfloat16 else tensor.element_size()
        return self._engine.uncompressed(parameter, tensor.numel(), itemsize)

    @property
    def _meets_first(self) -> bool:
        """Whether a step's first gradient waits for the meeting, even if it is sent whole."""
        return self._greets or not self._engine.agreed

    def _meet(self) -> None:
        """Begins a step: starts its meeting; waits for it, and compares the ranks, where that was not done yet."""
        engine, collectives = self._engine, self._collectives
        word = engine.word(engine.agreed, place=engine.place())
        self._ones.fill_(1.0)
        collectives.start_meeting(word, "step", partial(engine.hear, agree=self._compare_ranks, advice=SAME_STEPS))
        if not engine.agreed:
            # In an elastic job the others may be in their steps.
            collectives.await_all(None if collectives.elastic() else self._dense_name())
        elif self._greets:
            collectives.wait_meeting()  # a new rank waits for the comparison before it sends anything
        self._met = True

    def _dense_name(self) -> str:
        """Under which Horovod reduces the gradient that comes first on a rank without DeepReduce: the last one."""
        name = self._trained()[-1][0].name
        tensor = self._owners.tensors[name]
        for optimizer in sparse.optimizers_of(self):
            name = optimizer._parameter_names.get(tensor, name)
        return name

    def _compare_ranks(self) -> None:
        tensors = self._owners.tensors
        trained = {parameter.name: tensors[parameter.name] for parameter, _ in self._trained()}
        compared: dict[str, torch.Tensor] = {}
        # In an elastic job a new rank takes those of the state.
        if not (self._engine.agreed or self._collectives.elastic()):
            by_horovod = {id(tensor) for one in sparse.optimizers_of(self) for tensor in one._requires_update}
            compared = {name: tensor for name, tensor in trained.items() if id(tensor) in by_horovod}
        self._engine.agree(
            [
                (
                    p.name,
                    p.shape,
                    p.dtype + " frozen" * (p.name not in trained) + " uncompressed" * self._is_small(p),
                )
                for p in self._engine.parameters.values()
            ],
            hashes(compared),
            BROADCAST,
        )
        if self._collectives.elastic():
            self._send_tables_alone()  # what these ranks have seen, a new one has not

    def _trained(self) -> list[tuple[Parameter, Device]]:
        """The parameters that Horovod reduces. Those that were frozen later stay: Horovod sends zeros for them."""
        tensors = self._owners.tensors
        every = tensors.values()
        by = id(self._engine.parameters), self._sent_alone, list(map(_IS_TRAINED, every)), list(map(_DEVICE, every))
        if by != self._found_by:
            self._found_by = by[0], frozenset(by[1]), *by[2:]
            self._reduced.update(name for name, tensor in tensors.items() if tensor.requires_grad)
            self._found = [
                (parameter, self._tensors.device(tensors[name]))
                for name, parameter in self._engine.parameters.items()
                if name in self._reduced
            ]
        return self._found

    def _carrier(self, parameter: Parameter, gradient: torch.Tensor) -> torch.Tensor:
        """The parameter's carrier, 1.0, where Horovod takes it. One tensor for all steps: Horovod reduces it in place,
        and has ended before the parameter's next gradient comes. Those on the host are elements of ``_ones``, which
        was filled when the step began; on a GPU, streams may differ."""
        carrier = self._carriers.get(parameter.name)
        if carrier is None or carrier.device != wire_device(gradient):
            one, where = self._ones[parameter.number : parameter.number + 1], wire_device(gradient)
            carrier = self._carriers[parameter.name] = one if where.type == "cpu" else one.to(where)
        return carrier.fill_(1.0) if carrier.is_cuda else carrier


def _noting_latest(compression: weakref.ref[DeepReduce]) -> Callable[[torch.Tensor], None]:
    """A hook for each parameter whose gradient came. The model keeps it, and must not keep DeepReduce."""

    def note(tensor: torch.Tensor) -> None:
        known = compression()
        if known is not None:
            known._owners.latest, gradient = tensor, tensor.grad
            if gradient is not None and gradient.is_sparse:
                known._came(tensor)

    return note


def _coo_bytes(gradient: torch.Tensor) -> int:
    """Bytes of a sparse gradient's indices (int64) and values."""
    return 8 * gradient._indices().numel() + gradient._values().numel() * gradient.element_size()


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()
