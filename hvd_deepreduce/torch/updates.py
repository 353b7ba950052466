"""One exchange of updates: from the ranks' parameters to the outer step; ``local_sgd.py`` says when there is one."""

from __future__ import annotations

import copy
import logging
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from hvd_deepreduce.config import Config
from hvd_deepreduce.engine import Device, Engine, MismatchError, Parameter, Reducer, Snapshot, Ticket
from hvd_deepreduce.engine.state import Reshard
from hvd_deepreduce.exchange import traffic
from hvd_deepreduce.local_updates import LocalUpdates
from hvd_deepreduce.torch.collectives import TorchCollectives, wire_device
from hvd_deepreduce.torch.states import as_tensors, on_host
from hvd_deepreduce.torch.tensors import TorchTensors

_log = logging.getLogger("hvd_deepreduce")

Outer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


@dataclass
class Fragment:
    """Parameters that are exchanged together.

    Attributes:
        numbers: of the parameters.
        reducer: of their updates.
        due: the clock at which the next exchange begins.
        ends: the clock at which the exchange in flight ends; None: none is.
        began: the clock of the last exchange.
        updates: what is in flight, by number; afterwards the means over the ranks.
        tickets: of the updates that travel in containers.
        handles: Horovod's, by number, of the updates that are too small for one.
        present: whether this rank has sent an update in the exchange in flight.
        starts: with a delay, this rank's parameters when the exchange in flight began.
        keeps: with a delay and ``mix``, the share of its parameters that this rank keeps.
    """

    numbers: list[int]
    reducer: Reducer[torch.Tensor]
    due: int = 0
    ends: int | None = None
    began: int = 0
    updates: dict[int, torch.Tensor] = field(default_factory=dict)
    tickets: list[Ticket[torch.Tensor]] = field(default_factory=list)
    handles: dict[int, int] = field(default_factory=dict)
    present: bool = True
    starts: dict[int, torch.Tensor] = field(default_factory=dict)
    keeps: float = 0.0


class Updates:
    """The anchor of one rank, and the exchanges that move it.

    Args:
        pairs: parameters by name.
        inner: the optimizer of this rank's steps.
        config: with ``local``.
        outer: makes the optimizer of the anchor; None: that of ``config.local``.
        apart: whether a rank may leave out exchanges, so that it must remember the anchor that it took last.
        process_set: of the ranks that take part; None: all.

    Attributes:
        local: settings.
        parameters, tensors: of the model, those that are trained.
        engine: this rank's compression.
        fragments: of the model.
        anchors: by parameter; empty before ``begin``. float64 where the parameter is, otherwise float32.
        bases: with ``apart``, the anchors that this rank took last.
        outer: the optimizer of the anchor; None before ``begin``.
        clock: local steps so far.
    """

    def __init__(
        self,
        pairs: dict[str, torch.Tensor],
        inner: torch.optim.Optimizer,
        config: Config,
        outer: Outer | None = None,
        apart: bool = False,
        process_set: Any = None,
    ) -> None:
        assert config.local is not None
        self.local: LocalUpdates = config.local
        self.parameters = [
            Parameter(name, number, tuple(tensor.shape), str(tensor.dtype))
            for number, (name, tensor) in enumerate(pairs.items())
        ]
        self.tensors = list(pairs.values())
        self._inner = inner
        self._outer_factory = outer or self._default_outer
        self._apart = apart
        self._framework = TorchTensors()
        self.collectives = TorchCollectives(self._framework, process_set)
        self.engine = Engine(config, self.collectives, self.parameters)
        self.anchors: list[torch.Tensor] = []
        self.bases: list[torch.Tensor] = []
        self.outer: torch.optim.Optimizer | None = None
        self.clock = 0
        self.agreed = False
        self.fragments = self._divided()

    def _default_outer(self, anchors: list[torch.Tensor]) -> torch.optim.Optimizer:
        local = self.local
        nesterov = local.nesterov and local.momentum > 0
        return torch.optim.SGD(anchors, lr=local.lr, momentum=local.momentum, nesterov=nesterov)

    def _divided(self) -> list[Fragment]:
        """Neighbouring parameters, about the same number of elements in each fragment."""
        count = min(self.local.fragments, len(self.parameters))
        total = sum(parameter.numel for parameter in self.parameters)
        groups: list[list[int]] = [[]]
        held = 0
        for parameter in self.parameters:
            left = len(self.parameters) - parameter.number
            middle = held + parameter.numel / 2
            enough = middle * count >= total * len(groups) or left == count - len(groups)
            if groups[-1] and len(groups) < count and enough:
                groups.append([])
            groups[-1].append(parameter.number)
            held += parameter.numel
        return [
            Fragment(numbers, Reducer(self.engine, self._framework, self._expected(numbers), numbers[0], place))
            for place, numbers in enumerate(groups)
        ]

    def _expected(self, numbers: list[int]) -> Callable[[], list[tuple[Parameter, Device]]]:
        return lambda: [(self.parameters[n], self._framework.device(self.tensors[n])) for n in numbers]

    def begin(self) -> None:
        """Before the first step: takes the parameters as the anchor. Afterwards, it does nothing."""
        if self.anchors:
            return
        anchors = [one.detach().to(accumulated_in(one), copy=True) for one in self.tensors]
        self.outer = self.outer_of(anchors)
        self.anchors = anchors
        if self._apart:
            self.bases = [anchor.clone() for anchor in anchors]

    def outer_of(self, anchors: list[torch.Tensor]) -> torch.optim.Optimizer:
        outer = self._outer_factory(anchors)
        if not isinstance(outer, torch.optim.Optimizer):
            raise TypeError(
                f"outer returned {type(outer).__name__}, but it must return an optimizer of the tensors that it is "
                "given, as partial(torch.optim.SGD, lr=1.0) does"
            )
        return outer

    def exchange(self, fragment: Fragment, present: bool = True, delay: int | None = None) -> None:
        """Begins an exchange, and ends it if there is no delay.

        Args:
            present: whether this rank sends its update. All others send nothing.
            delay: None: that of the settings.
        """
        delay = self.local.delay if delay is None else delay
        engine = self.engine
        engine.stats.begin_step()
        updates = {n: self._update(n) for n in fragment.numbers} if present else {}
        together = self._meet(fragment, finite(updates.values()))
        steps, fragment.began = self.clock - fragment.began, self.clock
        engine.stats.add(dense=steps * self._dense_bytes(fragment))
        if not together:
            self._discard(fragment, present)
            engine.stats.end_step()
            return
        if present:
            engine.decay([self.parameters[n] for n in fragment.numbers], self.local.decay)
        else:
            updates = {n: torch.zeros_like(self.anchors[n]) for n in fragment.numbers}
        engine.feedback = present
        try:
            for number, update in updates.items():
                self._start(fragment, number, update)
        finally:
            engine.feedback = True
        fragment.present = present
        fragment.ends = self.clock + delay
        if not delay:
            self.end(fragment)
        elif self.local.mix is None:
            fragment.starts = {n: self.tensors[n].detach().clone() for n in fragment.numbers}
        else:
            fragment.keeps = self.local.mix

    def _update(self, number: int) -> torch.Tensor:
        """How far this rank has come, in the anchor's dtype."""
        base = (self.bases or self.anchors)[number]
        own = self.tensors[number].detach()
        # What the rank has taken is the anchor rounded to the parameter's dtype.
        return base.to(own.dtype).to(base.dtype) - own.to(base.dtype)

    def _meet(self, fragment: Fragment, finite: bool) -> bool:
        """Compares the ranks; returns whether the updates of all of them are finite."""
        engine, collectives = self.engine, self.collectives
        said: list[bool] = []
        collectives.start_meeting(
            engine.word(self.agreed, not finite),
            f"local.{self.parameters[fragment.numbers[0]].name}",
            lambda total: said.append(engine.hear(total, self._compare_ranks)),
        )
        if self.agreed:
            collectives.wait_meeting()
        else:
            collectives.await_all(None)
        return said[0]

    def _compare_ranks(self) -> None:
        """The handshake, and the comparison of the anchors.

        Raises:
            MismatchError: they differ; on all ranks.
        """
        self.engine.agree([(p.name, p.shape, p.dtype) for p in self.parameters])
        assert self.outer is not None
        sums = [zlib.crc32(np.ascontiguousarray(anchor.cpu().numpy()).data) for anchor in self.anchors]
        defaults = {key: value for key, value in self.outer.defaults.items() if isinstance(value, int | float)}
        about = f"{type(self.outer).__name__} {defaults}"
        own = np.array([self.clock, zlib.crc32(about.encode()), *sums], np.int64)
        told = self.collectives.allgather(own.view(np.uint8), "anchors")
        if told.size != self.collectives.size() * own.nbytes:
            raise MismatchError("ranks of this job use LocalSGD with different models: give it the same on all ranks")
        rows = told.view(np.int64).reshape(self.collectives.size(), own.size)
        apart = [place for place in range(own.size) if (rows[:, place] != rows[0, place]).any()]
        if apart:
            place = apart[0]
            rank = int(np.flatnonzero(rows[:, place] != rows[0, place])[0])
            what = f"the parameter {self.parameters[max(0, place - 2)].name} has other values"
            if place < 2:
                what = ["LocalSGD has taken another number of steps", "the outer optimizer has other settings"][place]
            raise MismatchError(
                f"on rank {rank}, {what} than on rank 0. Every rank must begin with the same parameters and settings: "
                "call hvd.broadcast_parameters(model.state_dict(), root_rank=0) before the first step, make LocalSGD "
                "with the same arguments, and take the same number of steps on all ranks"
            )
        self.agreed = True

    def _start(self, fragment: Fragment, number: int, update: torch.Tensor) -> None:
        engine, parameter = self.engine, self.parameters[number]
        small = engine.config.scope == "tensor" and engine.uncompressed(parameter, update.numel(), update.itemsize)
        if small:
            update = update.to(wire_device(update))
            fragment.handles[number] = hvd.allreduce_async_(
                update, name=f"deepreduce.update.{parameter.name}", op=hvd.Average,
                process_set=self.collectives.process_set,
            )  # fmt: skip
            engine.count_allreduce(update.numel() * update.itemsize, 0)
        else:
            fragment.tickets.append(fragment.reducer.start(parameter, update))
        fragment.updates[number] = update

    def _dense_bytes(self, fragment: Fragment) -> int:
        """What a rank would send in a step that reduces the fragment's gradients dense."""
        size = sum(self.tensors[n].numel() * self.tensors[n].element_size() for n in fragment.numbers)
        return traffic.allreduce(size, self.collectives.size()).sent

    def end(self, fragment: Fragment) -> None:
        """Waits for an exchange, takes the outer step, and lets the local parameters follow."""
        assert self.outer is not None
        tickets, handles, updates = fragment.tickets, fragment.handles, fragment.updates
        fragment.tickets, fragment.handles, fragment.updates, fragment.ends = [], {}, {}, None
        for ticket in tickets:
            fragment.reducer.finish(ticket, 1 / self.collectives.size())
        for number, handle in handles.items():
            updates[number] = hvd.synchronize(handle).to(self.anchors[number].device)
        for number, mean in updates.items():
            self.anchors[number].grad = mean
        self.outer.step()
        for number in updates:
            self.anchors[number].grad = None
        if fragment.present:
            self._follow_anchor(fragment)
        self.engine.stats.end_step()

    @torch.no_grad()
    def _follow_anchor(self, fragment: Fragment) -> None:
        starts, keeps = fragment.starts, fragment.keeps
        fragment.starts, fragment.keeps = {}, 0.0
        if self.clock == fragment.began:  # nothing was done since: no rounding error either
            starts = {}
        for number in fragment.numbers:
            own, anchor = self.tensors[number], self.anchors[number]
            taken = anchor.to(own.dtype)
            if starts:
                own.add_(taken - starts[number])
            elif keeps:
                own.lerp_(taken, 1 - keeps)
            else:
                own.copy_(taken)
            if self.bases:
                self.bases[number].copy_(anchor)

    def _discard(self, fragment: Fragment, present: bool) -> None:
        """A rank has an update that is not finite: all go back to the anchor."""
        _log.warning(
            "a rank has NaN or infinity in its parameters after local step %d: all ranks continue from their last "
            "exchange", self.clock,
        )  # fmt: skip
        if not present:
            return
        self._follow_anchor(fragment)
        for number in fragment.numbers:
            state = self._inner.state.get(self.tensors[number], {})
            if not finite(one for one in state.values() if isinstance(one, torch.Tensor) and one.is_floating_point()):
                self._inner.state.pop(self.tensors[number])

    # State

    def close(self) -> None:
        """Ends the exchanges, and frees everything but the model."""
        self.engine.close()
        self.anchors, self.bases, self.outer = [], [], None

    def state_dict(self) -> dict[str, Any]:
        """Anchor, outer optimizer, residuals and step counts.

        Raises:
            RuntimeError: an exchange is in flight.
        """
        self._check_idle("state_dict")
        self.begin()
        assert self.outer is not None
        return {
            "clock": self.clock,
            "due": [fragment.due for fragment in self.fragments],
            "began": [fragment.began for fragment in self.fragments],
            "anchors": self._by_name(self.anchors),
            "bases": self._by_name(self.bases),
            "outer": copy.deepcopy(self.outer.state_dict()),
            "compression": as_tensors(self.engine.state_dict()),
        }

    def load_state_dict(self, own: Any, states: Sequence[Any], reshard: Reshard = False) -> None:
        """Continues where ``state_dict`` was called.

        Args:
            own: the state whose anchor and step counts are taken.
            states: those of all ranks with ``reshard``, otherwise ``own``.

        Raises:
            RuntimeError: an exchange is in flight.
            ValueError: as ``LocalSGD.load_state_dict``; nothing has changed then.
        """
        self._check_idle("load_state_dict")
        for state in states:
            self._check(state)
        anchors = self._on_devices(own["anchors"])
        outer = self.outer_of(anchors)
        outer.load_state_dict(own["outer"])
        compression = [on_host(state["compression"]) for state in states]
        self.engine.load_state_dict(compression if reshard else compression[0], reshard=reshard)
        self._restore(own, anchors, outer)

    def _restore(self, own: Mapping[str, Any], anchors: list[torch.Tensor], outer: torch.optim.Optimizer) -> None:
        self.anchors, self.outer, self.clock = anchors, outer, own["clock"]
        if self._apart:
            self.bases = self._on_devices(own["bases"] or own["anchors"])
        for fragment, due, began in zip(self.fragments, own["due"], own["began"], strict=True):
            fragment.due, fragment.began = due, began

    def rewind(self, own: Mapping[str, Any], snapshot: Snapshot) -> None:
        """Returns to a state of this process, whatever its rank is now. Exchanges in flight are forgotten.

        Args:
            own: what ``state_dict`` returned.
            snapshot: of the engine.
        """
        self.engine.rewind(snapshot)
        self.agreed = False
        for fragment in self.fragments:
            fragment.tickets, fragment.handles, fragment.updates = [], {}, {}
            fragment.ends, fragment.starts, fragment.keeps = None, {}, 0.0
        anchors = self._on_devices(own["anchors"])
        outer = self.outer_of(anchors)
        outer.load_state_dict(own["outer"])
        self._restore(own, anchors, outer)

    def _by_name(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {p.name: tensor.clone() for p, tensor in zip(self.parameters, tensors, strict=False)}

    def _on_devices(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        return [
            tensors[parameter.name].detach().to(one.device).clone()
            for parameter, one in zip(self.parameters, self.tensors, strict=True)
        ]

    def _check_idle(self, call: str) -> None:
        if any(fragment.ends is not None for fragment in self.fragments):
            raise RuntimeError(
                f"{call} was called while an exchange is in flight (delay is {self.local.delay}): call sync() on all "
                "ranks before"
            )

    def _check(self, state: Any) -> None:
        """
        Raises:
            ValueError: this is not what ``state_dict`` returns, for this model and these fragments.
        """
        keys = {"clock", "due", "began", "anchors", "bases", "outer", "compression"}
        if not isinstance(state, Mapping) or not keys <= state.keys():
            raise ValueError(f"this is not a state of LocalSGD: it must have {', '.join(sorted(keys))}")
        counts = [state["clock"], *state["due"], *state["began"]]
        if not all(isinstance(count, int) and count >= 0 for count in counts):
            raise ValueError("the step counts of the state must be integers, 0 or more")
        if not len(state["due"]) == len(state["began"]) == len(self.fragments):
            raise ValueError(
                f"the state is of {len(state['due'])} fragments, and the settings are of {len(self.fragments)}: use "
                "the settings with which it was saved"
            )
        names = {parameter.name for parameter in self.parameters}
        for kind in ("anchors", "bases") if state["bases"] else ("anchors",):
            if state[kind].keys() != names:
                raise ValueError("the parameters of the state and of the model differ: load the state of this model")
            for parameter, tensor in zip(self.parameters, self.tensors, strict=True):
                given, dtype = state[kind][parameter.name], accumulated_in(tensor)
                if given.shape != tensor.shape or given.dtype != dtype or not finite([given]):
                    raise ValueError(
                        f"the anchor of {parameter.name} is {given.dtype} {list(given.shape)}; it must be {dtype} "
                        f"{list(tensor.shape)}, and finite"
                    )


def accumulated_in(tensor: torch.Tensor) -> torch.dtype:
    """The dtype in which its updates are added up."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def finite(tensors: Iterable[torch.Tensor]) -> bool:
    given = list(tensors)
    return not given or math.isfinite(float(torch.nn.utils.get_total_norm(given, math.inf)))
