"""The adapter for stock Horovod on PyTorch.

Horovod calls ``compress(gradient)``, allreduces the result under the parameter's name, and calls
``decompress(output, context)``. So ``compress`` starts the gradient's exchange and returns a carrier: a tensor with the
single element 1.0. Horovod turns it into the factor by which it would have scaled the gradient (1 for Average, the
number of ranks for Sum, whatever the options), and ``decompress`` applies it to the mean of the containers.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from horovod.torch.compression import Compressor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hvd_deepreduce.config import Config
from hvd_deepreduce.engine import Device, ElasticState, Engine, Parameter, Reducer, Snapshot, Ticket
from hvd_deepreduce.engine.compiling import Compilation
from hvd_deepreduce.engine.compression import Compression
from hvd_deepreduce.engine.small import CARRIER_BYTES
from hvd_deepreduce.engine.state import Reshard, State
from hvd_deepreduce.exchange import traffic
from hvd_deepreduce.horovod import SAME_STEPS
from hvd_deepreduce.torch.checks import Optimizers
from hvd_deepreduce.torch.collectives import TorchCollectives, restore, uncompressed, wire_device
from hvd_deepreduce.torch.dense import DenseBypass
from hvd_deepreduce.torch.owners import Model, Owners, no_instance
from hvd_deepreduce.torch.sparse import SparseGradients
from hvd_deepreduce.torch.streams import look_at_stream
from hvd_deepreduce.torch.tensors import IS_TRAINED, TorchTensors, as_tensors, flush, hashes, of_each, on_host

BROADCAST = (
    "Before the first step, call hvd.broadcast_parameters(model.state_dict(), root_rank=0), with process_set= if "
    "DeepReduce has one; or load the same checkpoint on all ranks. Horovod's call refuses bfloat16: there, call "
    "model.load_state_dict(hvd.broadcast_object(model.state_dict(), 0))"
)
_HOST = torch.device("cpu")
_DEVICE = attrgetter("device")
_models: weakref.WeakKeyDictionary[DeepReduce, set[int]] = weakref.WeakKeyDictionary()
"""Ids of the parameters of each DeepReduce of this process, also of closed ones."""


class DeepReduce(Compression, Compressor):  # type: ignore[misc]
    """Compresses gradients to a few percent of their bytes. For ``compression=`` of ``hvd.DistributedOptimizer``.

    Works with op Average and Sum, gradient_predivide_factor, groups, backward_passes_per_step, sparse_as_dense and
    process_set, under horovodrun (MPI or Gloo) and mpirun. All ranks must create it with the same config and model.

    Sparse gradients, as of ``nn.Embedding(sparse=True)``, stay sparse. With every exchange but those over MPI, and
    the sparsifiers ``nonzero``, ``topk``, ``topk_capped`` and ``threshold``, each has a container of its own, in
    every scope; under other settings Horovod sends them uncompressed. Between backward() and synchronize(), such a
    ``grad`` is a carrier and not the gradient.

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
        model: Model | None = None,
        config: str | Path | Mapping[str, Any] | Config | None = None,
        *,
        process_set: Any = None,
        **settings: Any,
    ) -> None:
        self._owners = owners = Owners(model)
        own = set(owners.of)
        if any(not own.isdisjoint(ids) for ids in _models.values()):
            # An optimizer that was deleted, to be made again, lives on in a cycle with its hooks, and would go on
            # reducing gradients under the same names. An error's traceback may hold the graph, which holds the hooks:
            # the second call frees these.
            gc.collect()
            gc.collect()
        _models[self] = own
        self._tensors = TorchTensors()
        self._collectives = TorchCollectives(self._tensors, process_set)
        # Whether a new rank may come without a vote: it waits for the others at its first gradient, whatever that is.
        self._greets = self._collectives.elastic()
        self._engine = Engine(Config.load(config, **settings).for_gradients(), self._collectives, owners.parameters)
        self._step_checked = False  # in the step that is under way
        self._bypass = DenseBypass()
        self._optimizers = Optimizers(self, self._engine, owners)
        self._carriers = _Carriers(self._engine, self._optimizers)
        self._sparse = SparseGradients(self._engine, owners, self._optimizers, self._is_small, self._check_step)
        # In scope ``tensor``: the names of those that are too small to be compressed, under the engine's generation.
        self._small: frozenset[str] = frozenset()
        self._small_in = -1
        # The parameters that Horovod reduces, and by what they were found: these are asked for at each step.
        self._reduced: set[str] = set()
        self._found: list[tuple[Parameter, Device]] = []
        self._found_by: tuple[Any, ...] = ()
        devices = [device for _, device in self._trained()]  # this notes which parameters Horovod will reduce
        self._compilation = Compilation(
            self._engine.config, self._tensors, devices if self._takes_part() else [], self._collectives.speaks()
        )
        self._reducer = Reducer(
            self._engine, self._tensors, self._trained, excluded=self._is_apart, busy=torch.get_num_threads
        )
        self._hooked = [tensor for tensor in owners.tensors.values() if tensor.requires_grad]
        self._handles: list[Any] = []
        self._hook()
        self._remove_hooks = weakref.finalize(self, _remove, self._handles)
        self._remove_hooks.atexit = False

    def _change(self, new: Config) -> None:
        self._leave_bypass()
        self._engine.set_config(new)

    def state_dict(self) -> dict[str, Any]:
        self._check_early()
        self._settle()
        return as_tensors(self._engine.state_dict())

    def _settle(self) -> None:
        self._reducer.settle()
        self._tensors.settle(self._owners.tensors.values())

    def _load(self, state: State, reshard: Reshard) -> None:
        self._forget_step()
        self._engine.load_state_dict(of_each(on_host, state, reshard), reshard=reshard)
        self._sparse.forget()
        self._step_checked = False

    def rewind(self, snapshot: Snapshot) -> None:
        self._forget_step()
        self._engine.rewind(snapshot)
        self._sparse.forget()
        self._step_checked = False

    def _forget_step(self) -> None:
        self._leave_bypass()
        self._reducer.settle()

    def sync_from_root(self, told: ElasticState) -> None:
        self._greets = False
        self.rewind(self._engine.state_from_root(told))

    def close(self) -> None:
        self._forget_step()
        self._engine.close()
        self._remove_hooks()
        # Horovod's optimizer may keep this object alive: let go of the model and of the buckets.
        self._owners.forget()
        self._carriers.made.clear()
        self._sparse.forget()
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
        resting = not self._owners.tensors[parameter.name].requires_grad  # frozen since; Horovod reduces what it has
        if resting:
            tensor.zero_()
        # Whether it is sent whole: it is small, or the step is dense.
        whole = parameter.name in self._small or (engine.choice is not None and engine.dense)
        if not self._step_checked:
            self._check_step(whole)
            whole = parameter.name in self._small or (engine.choice is not None and engine.dense)
        if whole:
            if engine.to_flush(parameter, small=parameter.name in self._small) and not resting:
                flush(engine, self._tensors, parameter, tensor)
            sent, copied = uncompressed(tensor)
            engine.count_allreduce(sent.numel() * sent.element_size(), dense_bytes)
            return sent, copied
        ticket = self._reducer.start(parameter, tensor, own, resting)
        carriers = self._carriers
        carriers.sent += 1
        carriers.dense += traffic.allreduce(dense_bytes, engine.ranks).sent
        carrier = carriers.made.get(parameter.name)
        if carrier is None or carrier.is_cuda or tensor.is_cuda:
            carrier = carriers.of(parameter, tensor)
        return carrier, ticket

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Called by Horovod with the allreduced carrier; returns the reduced gradient, in the gradient's own memory.

        Raises:
            ContainerError: a container cannot be decoded; names its rank.
            MismatchError: the ranks' configs differ.
            RuntimeError: ``close`` was called.
        """
        engine = self._engine
        try:
            if engine.closed:
                engine.check_open()
            if isinstance(ctx, Ticket):
                factor = self._carriers.read(ctx.parameters[0], tensor) if tensor.is_cuda else float(tensor)
                tensor = self._reducer.finish(ctx, factor / engine.ranks)
            elif tensor.is_sparse:
                tensor = self._sparse.finish(tensor)
            else:
                tensor = restore(tensor, ctx)
        except Exception:
            self._complete()
            raise
        if not engine.in_flight:
            if self._carriers.sent:
                self._carriers.count()
            engine.stats.end_step()
            self._step_checked = False
        return tensor

    def _complete(self) -> None:
        """After an error that comes when the backward pass is over: waits until all that this rank has started in this
        step is complete on all ranks, whose backward passes may not be over. Other errors are not raised.

        This rank may call ``hvd.join()`` now. Horovod would count it twice for what it still has in flight, and run
        that on ranks that have not started it yet: these crash.
        """
        self._reducer.complete()
        self._collectives.complete()
        self._optimizers.complete()
        self._sparse.forget()
        self._engine.forget()
        self._engine.stats.end_step()
        self._step_checked = False

    def _enter_bypass(self) -> None:
        """With ``mode: auto``, while steps are dense for certain and nothing waits in a residual, Horovod's calls go to
        the bypass, and this object takes no time."""
        engine, bypass = self._engine, self._bypass
        if bypass.left:
            bypass.count(engine)
            if not bypass.left:
                self._leave_bypass()
        elif engine.choice is not None and not self._sparse.alone and len(self._optimizers.checked) == 1:
            certain = 0 if engine.failed or self._collectives.elastic() else engine.choice.certain()
            if certain and not any(map(engine.to_flush, engine.parameters.values())):
                bypass.begin(engine, certain)
                self.__dict__.update(compress=bypass.compress, decompress=restore)
                _remove(self._handles)

    def _leave_bypass(self) -> None:
        if self._bypass.begun:
            self._bypass.end(self._engine)
            del self.compress, self.decompress
            self._hook()

    def _hook(self) -> None:
        """Notes from now on which gradient came last. The model keeps the hook, which must not keep this object."""
        this = weakref.ref(self)

        def note(tensor: torch.Tensor) -> None:
            known, gradient = this(), tensor.grad
            if known is not None:
                known._owners.latest = tensor
                if gradient is not None and gradient.is_sparse and known._takes_part():
                    known._sparse.grad_ready(tensor, gradient)

        for tensor in self._hooked:
            trained = tensor.requires_grad
            tensor.requires_grad_(True)  # it may have been frozen since, and PyTorch refuses the hook then
            self._handles.append(tensor.register_post_accumulate_grad_hook(note))  # type: ignore[no-untyped-call]
            tensor.requires_grad_(trained)

    def _takes_part(self) -> bool:
        return self._collectives.included() and self._collectives.size() > 1

    def _is_apart(self, parameter: Parameter) -> bool:
        """Whether the parameter's gradients are in no bucket: they are sparse, or too small to be compressed."""
        if self._small_in != self._engine.generation:
            self._find_small()
        return parameter.name in self._sparse.alone or parameter.name in self._small

    def _find_small(self) -> None:
        """Finds the parameters whose gradients are sent uncompressed."""
        tensors, engine = self._owners.tensors, self._engine
        self._small = frozenset(filter(lambda name: self._is_small(engine.parameters[name]), tensors))
        self._small_in = engine.generation

    def _is_small(self, parameter: Parameter) -> bool:
        tensor = self._owners.tensors[parameter.name]
        itemsize = 4 if tensor.dtype == torch.bfloat16 else tensor.element_size()
        return self._engine.uncompressed(parameter, tensor.numel(), itemsize)

    def _check_step(self, whole: bool) -> None:
        """Begins a step, unless this was done: starts its step check. If the ranks were not compared yet, it waits and
        compares them; only then for a gradient that is sent ``whole``."""
        if self._step_checked or (whole and self._engine.agreed and not self._greets):
            return
        engine, collectives = self._engine, self._collectives
        vote = engine.vote(self._engine.agreed, place=engine.place())
        self._carriers.begin_step()
        collectives.start_step_check(vote, "step", partial(engine.tally, agree=self._compare_ranks, advice=SAME_STEPS))
        if not engine.agreed:
            self._compilation.wait()
            # In an elastic job the others may be in their steps.
            collectives.await_all(None if collectives.elastic() else self._dense_name())
        elif self._greets:
            collectives.wait_step_check()  # a new rank waits for the comparison before it sends anything
        self._step_checked = True

    def _dense_name(self) -> str:
        """Under which Horovod reduces the gradient that comes first on a rank without DeepReduce: the last one."""
        name = self._trained()[-1][0].name
        tensor = self._owners.tensors[name]
        for optimizer in self._optimizers.search():
            name = optimizer._parameter_names.get(tensor, name)
        return name

    def _compare_ranks(self) -> None:
        tensors = self._owners.tensors
        trained = {parameter.name: tensors[parameter.name] for parameter, _ in self._trained()}
        compared: dict[str, torch.Tensor] = {}
        # In an elastic job a new rank takes those of the state.
        if not (self._engine.agreed or self._collectives.elastic()):
            by_horovod = {id(tensor) for one in self._optimizers.search() for tensor in one._requires_update}
            compared = {name: tensor for name, tensor in trained.items() if id(tensor) in by_horovod}
        self._engine.agree(
            [
                (p.name, p.shape, p.dtype + " frozen" * (p.name not in trained) + " uncompressed" * self._is_small(p))
                for p in self._engine.parameters.values()
            ],
            hashes(compared),
            BROADCAST,
        )
        if self._collectives.elastic():
            self._sparse.begin_anew()  # what these ranks have seen, a new one has not

    def _trained(self) -> list[tuple[Parameter, Device]]:
        """The parameters that Horovod reduces. Those that were frozen later stay: Horovod sends zeros for them."""
        tensors = self._owners.tensors
        every = tensors.values()
        by = id(self._engine.parameters), self._sparse.alone, list(map(IS_TRAINED, every)), list(map(_DEVICE, every))
        if by != self._found_by:
            self._found_by = by[0], frozenset(by[1]), *by[2:]
            self._reduced.update(name for name, tensor in tensors.items() if tensor.requires_grad)
            self._found = [
                (parameter, self._tensors.device(tensors[name]))
                for name, parameter in self._engine.parameters.items()
                if name in self._reduced
            ]
        return self._found


class _Carriers:
    """What Horovod reduces in place of gradients: 1.0. Each is one tensor for all steps: Horovod reduces it in place,
    and has ended before the parameter's next gradient comes.

    Attributes:
        made: by the parameter's name.
        sent, dense: how many were sent in this step, and the bytes that their gradients would have sent.
    """

    def __init__(self, engine: Engine, optimizers: Optimizers) -> None:
        self._engine, self._optimizers = engine, optimizers
        self.made: dict[str, torch.Tensor] = {}
        self.sent = self.dense = 0
        self._ones = {_HOST: torch.ones(len(engine.parameters), dtype=torch.float64)}  # the carriers, by device
        # Of this step: where ones were written on a GPU, and the streams that are in order after that; and what has
        # been read of an optimizer's carriers there.
        self._written: dict[torch.device, tuple[torch.cuda.Event, set[torch.cuda.Stream]]] = {}
        self._read: dict[object, float] = {}

    def begin_step(self) -> None:
        self._ones[_HOST].fill_(1.0)
        self._written.clear()
        self._read.clear()

    def of(self, parameter: Parameter, gradient: torch.Tensor) -> torch.Tensor:
        """The parameter's, where Horovod takes it."""
        carrier, where = self.made.get(parameter.name), wire_device(gradient)
        if carrier is None or carrier.device != where:
            if where.type == "cuda" and not self.made:
                look_at_stream(self._engine, where)
            if where not in self._ones:
                self._ones[where] = self._ones[_HOST].to(where)
            carrier = self.made[parameter.name] = self._ones[where][parameter.number : parameter.number + 1]
        if where.type == "cuda":
            self._order(where)
        return carrier

    def _order(self, device: torch.device) -> None:
        """Writes ones on a GPU, once in a step. The current stream, for which Horovod waits, is in order after that."""
        stream, written = torch.cuda.current_stream(device), self._written.get(device)
        if written is None:
            self._ones[device].fill_(1.0)
            self._written[device] = stream.record_event(), {stream}
        elif stream not in written[1]:
            stream.wait_event(written[0])
            written[1].add(stream)

    def read(self, parameter: Parameter, reduced: torch.Tensor) -> float:
        """What Horovod has made of the parameter's carrier on a GPU. All of an optimizer's become the same in a step,
        since Horovod takes op, predivide factor and process set from the optimizer. So one is read: it takes the host
        as long as the GPU needs for what was enqueued before, such as the sums of the buckets before."""
        optimizer = self._optimizers.of(parameter)
        if optimizer is None:
            return float(reduced)
        factor = self._read.get(optimizer)
        if factor is None:
            factor = self._read[optimizer] = float(reduced)
        return factor

    def count(self) -> None:
        """Counts those of a step."""
        one, sent = traffic.allreduce(CARRIER_BYTES, self._engine.ranks), self.sent
        self._engine.stats.add(wire=traffic.Traffic(sent * one.sent, sent * one.received), dense=self.dense)
        self.sent = self.dense = 0


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    compression = vars(optimizer).get("_compression")  # only Horovod's optimizers have one
    if isinstance(compression, DeepReduce):
        engine = compression._engine
        if engine.closed:
            engine.check_open()
        bypass = compression._bypass
        if bypass.begun and (optimizer._handles or not bypass.grad_ready):
            return  # of the two calls in a step (Horovod's, and of the optimizer that it calls), one counts it
        # A parameter without a gradient is sent by ``synchronize``, between the two calls.
        if engine.choice is not None and not optimizer._handles:
            compression._enter_bypass()
        compression._optimizers.check(optimizer)
    elif isinstance(compression, type) and issubclass(compression, DeepReduce):
        raise no_instance()


register_optimizer_step_pre_hook(_before_step)  # of any optimizer
