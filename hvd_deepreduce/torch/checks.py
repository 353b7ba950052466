"""Horovod's optimizers that were given a DeepReduce: how they are found, and what is checked before their steps.

With one rank Horovod calls no compression, and with many it shows only the gradients that it reduces. So mistakes that
it hides are found here, in a process that is debugged alone too.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Collection
from collections.abc import Set as AbstractSet
from contextlib import suppress
from itertools import chain
from operator import itemgetter
from typing import Any

import horovod.torch as hvd
import torch

from hvd_deepreduce.engine import Engine, Parameter, adaptive
from hvd_deepreduce.torch.owners import ADASUM, Owners
from hvd_deepreduce.torch.tensors import IS_TRAINED

LATE = (
    "parameters were unfrozen (requires_grad), or given to the optimizer, after hvd.DistributedOptimizer was made: "
    "{names}. Horovod does not reduce their gradients, so the ranks' parameters would differ from this step on; it was "
    "not applied. Make DeepReduce and the optimizer while all parameters that will ever be trained are trainable, and "
    "freeze them afterwards: Horovod reduces zeros for those. Or delete both, and the last loss, whose graph refers to "
    "the optimizer, and make them again"
)
INSTEAD = (
    'write optimizer = LocalSGD(optimizer, model, "adamw_safe") in place of hvd.DistributedOptimizer, and '
    f"optimizer.sync() at the end; {adaptive.OR_VOTES}"
)
IDLE = (
    "DeepReduce was given a model of which the optimizers do not train all parameters that need gradients: {names}. "
    "The density is that of the whole model, so the others are sent at a larger one; and a bucket is sent as the "
    "backward pass ends, since it waits for gradients that do not come. Freeze those parameters "
    "(requires_grad_(False)) before DeepReduce is made, or give DeepReduce the named parameters of the others alone"
)
_log = logging.getLogger("hvd_deepreduce")
_PARAMS = itemgetter("params")


class Optimizers:
    """
    Args:
        compression: the DeepReduce, which Horovod tells of no optimizer.
        engine, owners: its own.

    Attributes:
        checked: those that have begun a step, each with its parameters then.
    """

    def __init__(self, compression: object, engine: Engine, owners: Owners) -> None:
        self._compression, self._engine, self._owners = weakref.ref(compression), engine, owners
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._first_trained: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()  # at the first step
        self.checked: weakref.WeakKeyDictionary[Any, tuple[list[int], list[bool]]] = weakref.WeakKeyDictionary()
        self._of: dict[str, weakref.ref[Any]] = {}

    def search(self) -> Collection[Any]:
        """Looks among the objects that refer to the compression, which takes long."""
        compression, found = self._compression(), []
        for holder in gc.get_referrers(compression):
            for one in gc.get_referrers(holder) if isinstance(holder, dict) else [holder]:
                if isinstance(one, torch.optim.Optimizer) and vars(one).get("_compression") is compression:
                    found.append(one)
        self._known = weakref.WeakSet(found)
        return found

    def known(self) -> Collection[Any]:
        """Those of the last search, and those that have stepped since."""
        return self._known or self.search()

    def of(self, parameter: Parameter) -> weakref.ref[Any] | None:
        """The optimizer that lets Horovod reduce the parameter's gradients; None: it has not begun a step yet."""
        found = self._of.get(parameter.name)
        return None if found is None or found() is None else found

    def complete(self) -> None:
        """After an error: waits until all that Horovod has started is complete. The rank may go on, as at the end of
        Horovod's ``synchronize``, and come to the next step check. Other errors are not raised."""
        for optimizer in list(self.known()):
            for handle, _ in list(optimizer._handles.values()):
                with suppress(Exception):
                    handle() if callable(handle) else hvd.synchronize(handle)
            delays, counts = optimizer._allreduce_delay, optimizer._group_counts
            optimizer._handles.clear()
            delays.update(dict.fromkeys(delays, optimizer.backward_passes_per_step))
            counts.update(dict.fromkeys(counts, 0))

    def check(self, optimizer: Any) -> None:
        """Before each step of one.

        Raises:
            ValueError: Adasum, or a parameter of another model; or as ``adaptive.check_momentum``.
            RuntimeError: a parameter was unfrozen, or given to the optimizer, after that was made.
        """
        engine, owners = self._engine, self._owners
        if self._known:
            self._known.add(optimizer)
        if getattr(optimizer, "op", hvd.Adasum) == hvd.Adasum:  # its own class has none
            raise ValueError(f"the optimizer has {ADASUM}")
        if engine.has_velocity:
            adaptive.check_momentum(engine.config, optimizer)
        every = list(chain.from_iterable(map(_PARAMS, optimizer.param_groups)))
        seen = list(map(id, every)), list(map(IS_TRAINED, every))  # hashing tensors takes long
        if self.checked.get(optimizer) == seen:
            return
        trained = {id(parameter): parameter for parameter in every if parameter.requires_grad}
        for number, parameter in trained.items():
            if number not in owners.of:
                raise owners.unknown(parameter)
        # With one rank Horovod registers nothing: those of the first step, then.
        first = self._first_trained.setdefault(optimizer, set(trained))
        reduced = {id(one) for one in optimizer._requires_update} or first
        late = [owners.of[number].name for number in trained if number not in reduced]
        if late:
            optimizer.synchronize()  # nothing stays in flight
            raise RuntimeError(LATE.format(names=", ".join(late[:5]) + ", ..." * (len(late) > 5)))
        adaptive.check_momentum(engine.config, optimizer)
        adaptive.look_at(engine, optimizer, INSTEAD)
        names = (owners.of[number].name for number in reduced & owners.of.keys())
        if not self.checked:
            self._look_for_idle(reduced)
        self._of |= dict.fromkeys(names, weakref.ref(optimizer))
        self.checked[optimizer] = seen

    def _look_for_idle(self, reduced: AbstractSet[int]) -> None:
        """At the first step, warns on rank 0 of parameters that need gradients, and that no optimizer trains."""
        collectives = self._engine.collectives
        if not collectives.speaks() or collectives.size() == 1:
            return
        every = chain(reduced, *(map(id, one._requires_update) for one in self.known()))
        known, tensors = set(every), self._owners.tensors
        idle = [name for name, one in tensors.items() if one.requires_grad and id(one) not in known]
        if idle:
            names = ", ".join(idle[:3]) + (f" and {len(idle) - 3} more" if len(idle) > 3 else "")
            _log.warning(IDLE.format(names=names))
