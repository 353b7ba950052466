"""Finds what DDP shows to no hook: the model and its optimizer; and what LocalSGD cannot be used with: models and
optimizers that exchange gradients or parameters themselves."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hvd_deepreduce.engine import Engine, adaptive
from hvd_deepreduce.torch.tensors import is_sharded

INSTEAD = (
    'write optimizer = LocalSGD(optimizer, model, "adamw_safe", process_group=torch.distributed.group.WORLD) with the '
    f"model itself in place of DistributedDataParallel(model), and optimizer.sync() at the end; {adaptive.OR_VOTES}"
)
OF_REPLICAS = (
    'write compress_replicas(model, mesh["replicate"], "sign_momentum") and the optimizer '
    "hvd_deepreduce.torch.SignMomentum (docs/using.md)"
)
REDUCES = {
    "LocalSGD": (
        "reduces all gradients in each backward pass, while LocalSGD exchanges updates in their place: it would save "
        "nothing. Make LocalSGD with the bare model, and remove the DistributedDataParallel wrapper: model = "
        "model.module"
    ),
    "PeerOptimizer": (
        "reduces the gradients of a part of the model: wrap the whole model that PeerOptimizer trains in one "
        "DistributedDataParallel, and give PeerOptimizer that"
    ),
}
ONE = "and LocalSGD exchanges the updates between its replicas: give it their process group. Write: "
FSDP1 = "is sharded by FullyShardedDataParallel, which joins its parameters to one: use fully_shard in its place"


class Models:
    """Finds the DDP model of a hook's state: it is called before its gradients come. Until then, PyTorch tells us of
    each module that is called; no longer, since torch.compile would see our hook in the modules inside."""

    def __init__(self, state: Any) -> None:
        self._called: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._own: Callable[[], DistributedDataParallel | None] = lambda: None
        known = weakref.ref(state)

        def look(module: torch.nn.Module, _: object) -> None:
            if isinstance(module, DistributedDataParallel):
                self._called.add(module)
                state = known()
                if state is not None and any(one is state for _, one in module._comm_hooks):
                    self._own = weakref.ref(module)
                    self._handle.remove()
                    if not torch.compiler.is_compiling():  # torch.compile would warn of the threads
                        state.prepare(next(module.parameters()).device)

        self._handle = register_module_forward_pre_hook(look)
        weakref.finalize(state, self._handle.remove).atexit = False

    def of(self, parameter: torch.Tensor) -> list[DistributedDataParallel]:
        """The models that were called and train this parameter; first the one with the state."""
        self._handle.remove()
        own, called = self._own(), list(self._called)
        if own is None:
            return []
        around = [one for one in called if one is not own and any(p is parameter for p in one.parameters())]
        return [own, *around]


Watched = tuple[weakref.ref[Any], Container[int], str, weakref.WeakKeyDictionary[Any, bool]]
_watching: weakref.WeakKeyDictionary[Engine, Watched] = weakref.WeakKeyDictionary()
"""The engines that look at optimizers: who holds their parameters, the ids of these, what to write instead, and of the
optimizers that they have seen, whether these train their parameters. An engine may outlive its model, and another
model's parameters may then have the same ids. Parameters with weak references of their own could not be swapped, as
PyTorch does when it moves a sharded model."""


@functools.cache
def _hook() -> None:
    """One hook for all engines. It stays: one that is removed while an optimizer calls its hooks, by one of them or as
    garbage is collected, breaks off the step."""
    register_optimizer_step_pre_hook(_look)


def look_at_optimizers(engine: Engine, holder: object, ids: Container[int], instead: str = INSTEAD) -> None:
    """Looks at each optimizer that trains parameters with these ids, until the engine is closed, or their ``holder``,
    which keeps them, is gone: warns before its first step of one that compression harms, with the lines to write
    ``instead``, and refuses one, at any step, whose momentum the config has already."""
    _hook()
    _watching[engine] = weakref.ref(holder), ids, instead, weakref.WeakKeyDictionary()


def trains(optimizer: Any, ids: Container[int]) -> bool:
    """Whether an optimizer has parameters with these ids."""
    return any(id(parameter) in ids for group in optimizer.param_groups for parameter in group["params"])


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Calls a method as long as its object is there, for a hook that Python's garbage collector does not see."""
    known = weakref.WeakMethod(method)

    def call(*given: object) -> None:
        if (alive := known()) is not None:
            alive(*given)

    return call


def _look(optimizer: Any, *_: object) -> None:
    for engine, (holder, ids, instead, seen) in list(_watching.items()):
        if engine.closed or holder() is None:
            del _watching[engine]
            continue
        first = optimizer not in seen
        if first:
            seen[optimizer] = trains(optimizer, ids)
        if seen[optimizer] and (first or engine.has_velocity):  # the config, or the momentum, may change in between
            adaptive.check_momentum(engine.config, optimizer)
        if seen[optimizer] and first:
            adaptive.look_at(engine, optimizer, instead)


def refuse_wrapped(
    optimizer: torch.optim.Optimizer,
    model: object,
    tensors: Mapping[str, torch.Tensor],
    process_group: dist.ProcessGroup | None,
    others: bool,
    call: str,
) -> None:
    """Raises ``TypeError`` if the model that ``call``, LocalSGD or PeerOptimizer, was given is, or contains, a model of
    DistributedDataParallel or FullyShardedDataParallel, or if the optimizer is a ZeroRedundancyOptimizer; and an error
    if the model is sharded and the process group is not that of its replicas, unless these are in ``others``, jobs of
    their own."""
    for name, module in model.named_modules() if isinstance(model, torch.nn.Module) else ():
        kinds = _kinds(module)
        what = f"the model contains {name}," if name else "the model is"
        # DDP is also what torch.distributed._composable.replicate makes of a module's class.
        if kinds & {"DistributedDataParallel", "DDP"}:
            raise TypeError(f"{what} a DistributedDataParallel model, which {REDUCES[call]}")
        if "FullyShardedDataParallel" in kinds:
            raise TypeError(f"{f'{name} of the model' if name else 'the model'} {FSDP1}")
    for name, tensor in tensors.items():
        if getattr(tensor, "_is_flat_param", False):
            raise TypeError(f"the parameter {name} {FSDP1}")
    shards: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if is_sharded(tensor)}
    if shards:
        from hvd_deepreduce.torch import sharding

        if process_group is None and not others:
            raise TypeError(f"the parameter {next(iter(shards))} is sharded, {ONE}{sharding.LINES[call]}")
        sharding.check_replicas(model, shards, process_group, call)
    if "ZeroRedundancyOptimizer" in _kinds(optimizer):
        raise TypeError(
            f"the first argument of {call} is a ZeroRedundancyOptimizer, which trains a part of the parameters on "
            f"each rank, while {call} lets each rank train all of them: give {call} the optimizer that it is made of"
        )


reducing: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()
"""What ``compress_replicas`` has returned, until it is closed, with the ids of the parameters whose gradients it
exchanges."""


def refuse_reduced(tensors: Iterable[torch.Tensor], call: str = "LocalSGD") -> None:
    """Raises ``ValueError`` if ``compress_replicas`` exchanges gradients of these parameters, since ``call`` would
    exchange them, or updates, a second time."""
    ids = set(map(id, tensors))
    if any(not ids.isdisjoint(known) for known in list(reducing.values())):
        raise ValueError(
            f"compress_replicas exchanges the gradients of this model in each step already: close() what it has "
            f"returned, on all ranks, before {call}"
        )


def _kinds(value: object) -> set[str]:
    """Names of PyTorch's classes that it is an instance of. They need not be imported for this."""
    return {kind.__name__ for kind in type(value).__mro__ if kind.__module__.startswith("torch.")}


class Reductions:
    """Finds a DistributedDataParallel model that LocalSGD was not given, but that trains its parameters."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = {id(one) for one in tensors}
        self._seen: Mapping[Any, list[int]] | None = None
        self._compared = False

    def check(self) -> None:
        """Called before each step; raises ``TypeError`` at the second one if a model has reduced gradients since the
        first. A model that nobody calls is no mistake."""
        if self._compared or not (dist.is_available() and dist.is_initialized()):
            return
        if self._seen is None:
            made = [one for one in gc.get_objects() if DistributedDataParallel in type(one).__mro__]
            ours = [one for one in made if any(id(p) in self._tensors for p in one.module.parameters())]
            self._seen = weakref.WeakKeyDictionary({one: _times(one) for one in ours})
            return
        self._compared = True
        if any(_times(one) != times for one, times in self._seen.items()):
            why = REDUCES["LocalSGD"]
            raise TypeError(f"a DistributedDataParallel model trains the parameters of LocalSGD. It {why}")


def _times(model: Any) -> list[int]:
    """When its gradients came in its last reduction, in nanoseconds."""
    return list(model.reducer.get_backward_stats())
