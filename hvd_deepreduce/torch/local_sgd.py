"""Local updates: ranks train by themselves for some steps, and exchange how far they have come, compressed.

Basu, Data, Karakus, Diggavi, "Qsparse-local-SGD", NeurIPS 2019, Algorithms 1 and 2. What is done at an exchange, for
each parameter::

    update   = anchor - local              how far this rank has come since the last exchange
    residual = decay * residual + update
    sent     = what the config selects and encodes of the residual
    residual = residual - decoded(sent)
    anchor   = outer step, with the mean of all ranks' decoded(sent) as its gradient
    local    = anchor

The anchor is the same on all ranks, bit for bit. The learning rate is inside the update, so a lower one does not make
older residuals smaller.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from hvd_deepreduce.config import Config, ConfigError
from hvd_deepreduce.engine import ElasticState, Snapshot
from hvd_deepreduce.engine.local_options import Every, Options, Times, options
from hvd_deepreduce.engine.local_sgd import LocalSGDBase
from hvd_deepreduce.engine.peers import Quorum
from hvd_deepreduce.engine.state import Reshard
from hvd_deepreduce.exchange.store import SharedStore
from hvd_deepreduce.torch.discovery import Reductions, refuse_reduced, refuse_wrapped
from hvd_deepreduce.torch.owners import Model, named_parameters
from hvd_deepreduce.torch.tensors import outside_inference_mode, own
from hvd_deepreduce.torch.updates import Outer, Updates

_Elastic = tuple[dict[str, Any], tuple[ElasticState, dict[str, Any]]]
LINE = 'optimizer = LocalSGD(torch.optim.AdamW(model.parameters(), lr), model, "adamw_safe")'


def _of_inner(name: str) -> property:
    """An attribute of the wrapped optimizer."""
    return property(lambda me: getattr(me.inner, name), lambda me, value: setattr(me.inner, name, value))


class LocalSGD(LocalSGDBase, torch.optim.Optimizer):
    """Wraps an optimizer: it steps on this rank's own gradients, and every few steps the ranks exchange their updates.

    It takes the place of ``hvd.DistributedOptimizer``: gradients are not exchanged. Make the model equal on all ranks
    before the first step (``hvd.broadcast_parameters(model.state_dict(), root_rank=0)``), call ``sync()`` before an
    evaluation and at the end, and save ``state_dict()`` of every rank. Learning-rate schedulers, gradient clipping and
    ``torch.amp.GradScaler`` work as with the wrapped optimizer.

    It needs memory for three more copies of the model: the anchor, the residual, and the outer momentum if there is
    one.

    What the papers leave open:

    - The state of the wrapped optimizer, such as momentum, belongs to its rank and continues over exchanges.
    - Buffers, such as the statistics of batch normalization, are not exchanged, as under Horovod.
    - A step that GradScaler skips counts as a local step, so that the ranks stay in step.
    - If a rank has NaN or infinity in its parameters when an exchange begins, all ranks discard what they have done
      since the last one and continue from the anchor; residuals stay. State of the wrapped optimizer that is not finite
      starts anew on that rank.
    - All ranks take the same number of steps. ``sync()`` ends a period early; the next one then has its full length.

    Args:
        optimizer: for this rank's steps. All parameters that it trains belong to ``model``.
        model: the module, or its ``named_parameters()``.
        config: a preset's name, the path of a YAML file, a dict, a ``Config``, or None for the default, which is
            for gradients under SGD. Its key ``local`` has the defaults of the arguments below.
        every: local steps between two exchanges of a parameter; or a function of the local steps so far (of the clock,
            from 0) that returns how many steps the period has that begins there, on all ranks the same.
        outer: makes the optimizer of the anchor from a list of its tensors, such as ``partial(torch.optim.SGD, lr=0.7,
            momentum=0.9, nesterov=True)``. Its gradients are means of updates.
        decay, fragments, delay, mix, anchors: as in ``LocalSettings``, in place of the config's.
        times: for asynchronous exchanges (Algorithm 2): ``times(rank, clock)`` says whether this rank, with the number
            ``rank``, sends its update and takes the anchor after its step number ``clock``, counted from 1. Each rank
            decides for itself, in any way, and says so in a small allreduce after each local step. The others send
            nothing then, and only follow the anchor. One fragment, no delay. With ``every``, a rank that has not taken
            part for so many steps does so (the paper's bound H of the gap); without it, ``times`` alone decides.
        process_set: of the ranks that take part; None: all.
        process_group: of ``torch.distributed``, such as ``torch.distributed.group.WORLD``: the job then runs under
            torchrun, without Horovod. All of its ranks make LocalSGD at the same time. For a model whose parameters
            are sharded (``fully_shard``, tensor parallelism), the group of the ranks that hold the same shards, as
            ``mesh["replicate"].get_group()``.
        store: through which peers that come and go exchange, in place of Horovod and of a process group: a
            ``SharedStore``, or under torchft a ``ManagedQuorum`` (``torch/torchft.py``). Each is a job of its own, of
            one rank, or of those that hold the shards of its model. Exchange ``allgather``; no delay, no times.
        **settings: keys of the config, in place of its own.

    Raises:
        TypeError: an argument is not what it should be, or is wrapped by DistributedDataParallel,
            FullyShardedDataParallel or ZeroRedundancyOptimizer; or a sharded model has no ``process_group``.
        ImportError, RuntimeError: there is no ``process_group``, and no Horovod, or it does not know the ranks.
        ValueError: a parameter of the optimizer does not belong to the model, or two have the same name; or ``times``
            is given with fragments or a delay; or both a process set and a process group; or the process group of a
            sharded model is not that of its replicas; or ``compress_replicas`` exchanges the gradients of the model.
        ConfigError: the config cannot be used.
    """

    _sharded: list[Any]
    _step_supports_amp_scaling = True  # GradScaler then calls step() even if it must be skipped
    _steps: Steps

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: Model,
        config: str | Path | Mapping[str, Any] | Config | None = None,
        *,
        every: Every | None = None,
        outer: Outer | None = None,
        decay: float | None = None,
        fragments: int | None = None,
        delay: int | None = None,
        mix: float | None = None,
        anchors: Literal["device", "host"] | None = None,
        times: Times | None = None,
        process_set: Any = None,
        process_group: dist.ProcessGroup | None = None,
        store: SharedStore | Quorum | None = None,
        **settings: Any,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, LocalSGD):
            raise TypeError(
                f"the first argument of LocalSGD is {type(optimizer).__name__}, but it must be the optimizer of this "
                f"rank's own steps. Write: {LINE}"
            )
        if hasattr(optimizer, "_requires_update"):
            raise TypeError(
                "the first argument of LocalSGD is an hvd.DistributedOptimizer, which exchanges gradients: give "
                f"LocalSGD the optimizer that it wraps. Write: {LINE}"
            )
        if outer is not None and not callable(outer):
            raise TypeError(
                f"outer is {type(outer).__name__}; it must be a function that makes an optimizer from a list of "
                "tensors, as partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)"
            )
        names, pairs = trained(optimizer, model, process_group, store is not None, "LocalSGD", LINE)
        if hasattr(optimizer, "train") and hasattr(optimizer, "eval"):
            raise TypeError(
                f"{type(optimizer).__name__} has train() and eval(), as schedule-free optimizers have. They change the "
                "parameters between steps by what the optimizer keeps, which LocalSGD would exchange as progress: give "
                "it another optimizer"
            )
        refuse_reduced(pairs.values())
        self._reductions = Reductions(list(pairs.values()))
        self.inner, self._steps = optimizer, Steps(optimizer)
        given = options(
            config, settings, every=every, times=times, decay=decay, fragments=fragments, delay=delay, mix=mix,
            anchors=anchors, own_outer=outer is not None,
        )  # fmt: skip
        if sum(one is not None for one in (process_set, process_group, store)) > 1:
            raise ValueError(
                "process_set is Horovod's, process_group is torch.distributed's, and store is for peers without both: "
                "give one of them"
            )
        if store is not None:
            check_store(given, store)
        self._updates: Updates = Updates(given, optimizer, names, pairs, outer, process_set, process_group, store)
        self._sharded = fsdp_modules(model)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "skip_synchronize" in vars(cls):  # a method of Horovod's
            name = cls.__name__
            raise TypeError(
                f"{name} was given to hvd.DistributedOptimizer, which exchanges the gradients of each step. {name} "
                "takes its place: leave hvd.DistributedOptimizer out"
            )

    # Whoever assigns to them means the wrapped optimizer's.
    param_groups, state, defaults = map(_of_inner, ("param_groups", "state", "defaults"))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_optimizer_") or name in ("train", "eval"):  # its hooks; a schedule-free one
            return getattr(self.inner, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer's."""
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: it raises ``RuntimeError``."""
        name = type(self).__name__
        raise RuntimeError(
            f"{name} cannot take new parameters: give the wrapped optimizer all parameters, and then make {name}"
        )

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """A local step, and what is due after it: exchanges that begin or end.

        Raises:
            MismatchError: the ranks do not agree, do not begin (or go on, after a load) with the same anchor, or do not
                come to the same exchange; raised on all ranks. Nothing was exchanged then.
            TypeError: at the second step, if a DistributedDataParallel model reduces the gradients.
            RuntimeError: the optimizer has other parameters than when LocalSGD was made, or was stepped by itself; a
                rank has joined; or ``close`` was called.
            ContainerError: a container cannot be decoded; names its rank. Raised on all ranks; the parameters are then
                those before the exchange.
        """
        if torch.compiler.is_compiling():  # a function that calls this; nothing here can be traced
            return torch.compiler.disable(self.step)(closure)  # type: ignore[no-untyped-call, no-any-return]
        takes_part = self._takes_part("step")
        self._reductions.check()
        result = self._inner_step(closure)
        self._steps.known = self._steps.count
        if takes_part:
            self._updates.step()
        return result

    def _takes_part(self, call: str) -> bool:
        if apart := self._steps.count - self._steps.known:
            name = type(self).__name__
            raise RuntimeError(
                f"{type(self.inner).__name__}, which {name} wraps, was stepped {apart} times by itself, so that {name} "
                f"has counted no steps and begun no exchange: call step() of {name} in its place, and give {name} to "
                "whatever steps the optimizer"
            )
        updates = self._updates
        begun = updates.clock or any(one.outer_steps for one in updates.fragments)
        if call == "step" and updates.anchors and not begun:
            updates.begin_anew()  # other weights may have been loaded since something has read the state
        return super()._takes_part(call)

    def _inner_step(self, closure: Callable[[], float] | None) -> float | None:
        inner = self.inner
        found = getattr(self, "found_inf", None)  # set by GradScaler for the duration of the call
        if found is None:
            return inner.step(closure)
        if getattr(inner, "_step_supports_amp_scaling", False):
            inner.found_inf, inner.grad_scale = found, getattr(self, "grad_scale", None)  # type: ignore[attr-defined]
            try:
                return inner.step(closure)
            finally:
                del inner.found_inf, inner.grad_scale  # type: ignore[attr-defined]
        if float(found):
            return None
        self._unscale()
        return inner.step(closure)

    def _unscale(self) -> None:
        """What GradScaler leaves to an optimizer that supports it."""
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            gradients = [own(one.grad) for one in self._updates.tensors if one.grad is not None]
            if gradients:
                torch._foreach_div_(gradients, float(scale))

    @outside_inference_mode()
    def begin(self) -> None:
        super().begin()

    @outside_inference_mode()
    def sync(self) -> None:
        super().sync()
        self._reshard()

    def _reshard(self) -> None:
        """FSDP keeps what the root module has gathered in a forward pass that no backward pass follows."""
        for module in self._sharded:
            module.reshard()

    @outside_inference_mode()
    def state_dict(self) -> dict[str, Any]:
        """This rank's state: that of the wrapped optimizer, and under ``local_sgd`` anchor, outer optimizer, residuals
        and step counts, and exchanges in flight (``delay``), for whose means it waits: all ranks call it after the same
        step then. Ranks differ: each saves and loads its own, and the model beside it.

        Raises:
            ContainerError: as ``step``.
            RuntimeError: an exchange has failed, so that there is no state to go on from; or ``close`` was called.
        """
        updates = self._updates.state_dict()  # first: it may let the wrapped optimizer's state begin anew
        return {**self.inner.state_dict(), "local_sgd": updates}

    @outside_inference_mode()
    def load_state_dict(self, state_dict: Any, *, reshard: Reshard = False) -> None:
        """Continues where ``state_dict`` was called. The model must be loaded too.

        Args:
            state_dict: what ``state_dict`` returned on this rank. With ``reshard``, a list of what it returned on each
                rank, in the order of the ranks; a rank takes the optimizer's state of one of them.
            reshard: load the states of any number of ranks. True or "mean" preserves the residuals' mean over all
                ranks, which is what the anchor has still to get; "sum" their sum.

        Raises:
            RuntimeError: an exchange is in flight; or ``close`` was called.
            ValueError: a state of another rank, another number of ranks, another model or other fragments; or not a
                state of LocalSGD. Nothing has changed then.
        """
        updates = self._updates
        updates.engine.check_open()
        states = list(state_dict) if reshard else [state_dict]
        name = type(self).__name__
        for state in states:
            if not isinstance(state, Mapping) or "local_sgd" not in state:
                raise ValueError(
                    f"this is not a state of {name}: it has no 'local_sgd'. Load what its state_dict returned; the "
                    f"state of a plain optimizer is loaded into that, before {name} is made"
                )
        own = states[updates.collectives.rank() % len(states)]
        before = self.inner.state_dict()
        self._load_inner(own)
        try:
            found = [state["local_sgd"] for state in states]
            updates.load_state_dict(found if reshard else found[0], reshard, own["local_sgd"])
        except Exception:
            self.inner.load_state_dict(before)
            raise

    def _load_inner(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state_dict({key: value for key, value in state.items() if key != "local_sgd"})

    def snapshot(self) -> tuple[dict[str, Any], Snapshot]:
        return copy.deepcopy(self.inner.state_dict()), self._updates.snapshot()

    def rewind(self, snapshot: tuple[dict[str, Any], Snapshot]) -> None:
        self._load_inner(copy.deepcopy(snapshot[0]))  # which keeps the arrays that it is given
        self._updates.rewind(snapshot[1])

    def elastic_state(self) -> _Elastic:
        return self.inner.state_dict(), self._updates.elastic_state()

    def sync_from_root(self, told: _Elastic) -> None:
        """Takes anchor, outer optimizer, settings and step counts from rank 0 of an elastic job. The state of the
        wrapped optimizer and the residuals are kept if the step is the same; otherwise the former is rank 0's, too."""
        inner, updates = told
        if self._updates.clock != updates[1]["clock"]:
            self._load_inner(inner)
        self._updates.sync_from_root(updates)


def fsdp_modules(model: Model) -> list[Any]:
    """The modules of the model that ``fully_shard`` was applied to."""
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    return [one for one in modules if callable(getattr(type(one), "reshard", None))]


class Steps:
    """Counts the steps of an optimizer, but for those with a learning rate of 0, by which
    ``torch.distributed.checkpoint`` makes its state.

    Attributes:
        count: so far.
        known: of them, those that LocalSGD has made.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.count = self.known = 0
        me = weakref.ref(self)

        def stepped(optimizer: torch.optim.Optimizer, *_: object) -> None:
            steps = me()
            if steps is not None and any(group.get("lr", 1.0) for group in optimizer.param_groups):
                steps.count += 1

        optimizer.register_step_post_hook(stepped)  # stays: garbage is also collected amid an optimizer's hooks


def check_store(given: Options, store: object) -> None:
    """Raises ``TypeError`` or ``ConfigError`` if peers cannot exchange by these settings."""
    if not isinstance(store, SharedStore | Quorum):
        raise TypeError(
            f"store is {type(store).__name__}; it must be a SharedStore(folder, peer=..., peers=...), or under torchft "
            "a ManagedQuorum(manager, process_group, peer=..., peers=...)"
        )
    config, local = given.config, given.in_force
    for what, value, allowed in (
        ("exchange", config.exchange.name, "allgather"), ("hierarchical", config.hierarchical, False),
        ("mode", config.mode, "always"), ("delay", local.delay, 0), ("times", given.times, None),
    ):  # fmt: skip
        if value != allowed:
            raise ConfigError(f"{what} is {value!r}, and with a store it can only be {allowed!r}: leave it out")
    if isinstance(store, Quorum) and local.fragments > 1:
        raise ConfigError(
            f"fragments is {local.fragments}, and under torchft it can only be 1, since a replica that comes back "
            "takes the others' state in one exchange: leave it out"
        )


def trained(
    optimizer: torch.optim.Optimizer,
    model: Model,
    process_group: dist.ProcessGroup | None,
    others: bool,
    call: str,
    line: str,
) -> tuple[dict[int, str], dict[str, torch.Tensor]]:
    """Names of the model's parameters by id, and its parameters that the optimizer trains by name, in its order.

    Args:
        others: whether the replicas of the model are in jobs of their own.
        call, line: what the user has called, and how to, for errors.
    """
    if not hasattr(optimizer, "_optimizer_step_post_hooks"):  # PyTorch's constructor was not called
        raise TypeError(
            f"the first argument of {call} is {type(optimizer).__name__}, which holds an optimizer and is none of "
            f"PyTorch's: give {call} the optimizer that it holds, and {call} to what wraps optimizers, as "
            f"accelerator.prepare({call}(...))"
        )
    every = named_parameters(model, f"the second argument of {call}", line)
    refuse_wrapped(optimizer, model, every, process_group, others, call)
    names = {id(tensor): name for name, tensor in every.items()}
    ids = {id(one) for group in optimizer.param_groups for one in group["params"] if one.requires_grad}
    if not ids <= names.keys():
        raise ValueError(
            f"the optimizer trains parameters that do not belong to the model that {call} was given: give it the model "
            "that the optimizer trains"
        )
    chosen = {name: tensor for name, tensor in every.items() if id(tensor) in ids}
    if not chosen:
        raise ValueError("the optimizer has no trainable parameter of the model: there is nothing to exchange")
    for name, tensor in chosen.items():
        if not tensor.is_floating_point():
            raise ValueError(
                f"the parameter {name} is {tensor.dtype}, and {call} exchanges floating-point parameters"
            )
    return names, chosen
