"""Local updates without a framework: the schedule of the exchanges, and what is done in one.

The state of a rank: its own parameters, and the anchor, which is the same on all ranks, bit for bit. An adapter keeps
both, with the outer optimizer, and implements the methods of ``LocalExchanges`` that are abstract.
"""

from __future__ import annotations

import logging
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic

import numpy as np

from hvd_deepreduce.codec import Floats
from hvd_deepreduce.config import Config
from hvd_deepreduce.engine.agreement import MismatchError
from hvd_deepreduce.engine.collectives import Collectives
from hvd_deepreduce.engine.engine import Engine
from hvd_deepreduce.engine.parameter import Parameter
from hvd_deepreduce.engine.reducer import Reducer, Ticket
from hvd_deepreduce.engine.tensors import Device, G, Tensors
from hvd_deepreduce.exchange import traffic
from hvd_deepreduce.local_updates import LocalUpdates

_log = logging.getLogger("hvd_deepreduce")

Every = int | Callable[[int], int]
Times = Callable[[int, int], bool]


@dataclass
class Fragment(Generic[G]):
    """Parameters that are exchanged together.

    Attributes:
        numbers: of the parameters.
        reducer: of their updates.
        due: the clock at which the next exchange begins.
        ends: the clock at which the exchange in flight ends; None: none is.
        began: the clock of the last exchange.
        updates: what is in flight, by number; afterwards the means over the ranks.
        tickets: of the updates that travel in containers.
        small: of the other updates: what ``start_small`` returned; None: there are none.
        present: whether this rank has sent an update in the exchange in flight.
        starts: with a delay, this rank's parameters when the exchange in flight began, by number.
        keeps: with a delay and ``mix``, the share of its parameters that this rank keeps.
    """

    numbers: list[int]
    reducer: Reducer[G]
    due: int = 0
    ends: int | None = None
    began: int = 0
    updates: dict[int, G] = field(default_factory=dict)
    tickets: list[Ticket[G]] = field(default_factory=list)
    small: Any = None
    present: bool = True
    starts: dict[int, Any] = field(default_factory=dict)
    keeps: float = 0.0


class LocalExchanges(ABC, Generic[G]):
    """The exchanges of one rank.

    Args:
        config: with ``local``.
        collectives: of the ranks that take part.
        parameters: those that are trained, with their positions in this list as numbers.
        nbytes: of each parameter.
        tensors: the framework's.
        devices: returns that of each parameter.
        every: in place of the config's number, a function of the clock that returns how many steps the period has that
            begins there. A number is in the config.
        times: whether a rank takes part in an exchange after its step number ``clock``, in place of a period.

    Attributes:
        local: settings.
        parameters: as given.
        engine: this rank's compression.
        fragments: of the model.
        clock: local steps so far.
        agreed: whether the ranks have been compared.
    """

    advice: str
    """What to call so that all ranks begin with the same parameters."""

    def __init__(
        self,
        config: Config,
        collectives: Collectives,
        parameters: Sequence[Parameter],
        nbytes: Sequence[int],
        tensors: Tensors[G],
        devices: Callable[[], Sequence[Device]],
        every: Every | None = None,
        times: Times | None = None,
    ) -> None:
        assert config.local is not None
        self.local: LocalUpdates = config.local
        self.parameters = list(parameters)
        self.engine = Engine(config, collectives, parameters, [p.known_as or p.name for p in parameters])
        self.clock = 0
        self.agreed = False
        self._every = every if callable(every) else None
        self._times = times
        self._nbytes = nbytes

        def fragment(place: int, numbers: list[int]) -> Fragment[G]:
            def expected() -> list[tuple[Parameter, Device]]:
                where = devices()
                return [(self.parameters[number], where[number]) for number in numbers]

            return Fragment(numbers, Reducer(self.engine, tensors, expected, numbers[0], place, self._small))

        self.fragments = [fragment(place, numbers) for place, numbers in enumerate(self._divided())]
        first, count = self._period(0), len(self.fragments)
        for place, one in enumerate(self.fragments):
            one.due = first - first * (count - 1 - place) // count

    def _divided(self) -> list[list[int]]:
        """Numbers of neighbouring parameters, about as many elements in each fragment."""
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
        return groups

    # What the framework does

    @abstractmethod
    def update(self, number: int) -> G:
        """How far this rank's parameter has come, in the anchor's dtype: a new tensor. What the rank has taken last is
        the anchor rounded to the parameter's dtype."""

    @abstractmethod
    def nothing(self, number: int) -> G:
        """A new tensor of zeros, as ``update`` of a parameter that has not changed."""

    @abstractmethod
    def finite(self, updates: Iterable[G]) -> bool:
        """Whether they have neither NaN nor infinity."""

    @abstractmethod
    def meet(self, word: Floats, name: str, hear: Callable[[Floats], object]) -> None:
        """Calls ``hear`` with the sum of all ranks' words; waits for ranks that do not come only for a limited time, as
        long as ``agreed`` is not set."""

    @abstractmethod
    def start_small(self, updates: Mapping[int, G]) -> Any:
        """Starts the reduction of updates, by number, by the framework's own allreduce: all of them together."""

    @abstractmethod
    def finish_small(self, started: Any) -> Mapping[int, G]:
        """Their means over the ranks."""

    @abstractmethod
    def outer_step(self, fragment: Fragment[G]) -> None:
        """A step of the outer optimizer, with the fragment's ``updates`` as gradients of its part of the anchor."""

    @abstractmethod
    def copy(self, number: int) -> Any:
        """The parameter's values now."""

    @abstractmethod
    def follow(self, number: int, start: Any, keeps: float) -> None:
        """Changes this rank's parameter after the anchor was.

        Args:
            start: what ``copy`` returned: the difference of the anchor to it is added to the parameter. None: the
                parameter becomes the anchor.
            keeps: without ``start``, the share of its own values that the parameter keeps.
        """

    @abstractmethod
    def renew(self, numbers: Sequence[int]) -> None:
        """State of this rank's own optimizer that is not finite starts anew."""

    @abstractmethod
    def anchor_values(self, number: int) -> Floats:
        """The anchor of a parameter, on the host."""

    @abstractmethod
    def about_outer(self) -> str:
        """Name and settings of the outer optimizer; the same text on all ranks."""

    def check_parameters(self) -> None:  # noqa: B027  (only where they can change)
        """Called before an exchange; raises an error if other parameters are trained than at the beginning."""

    # Schedule

    def _period(self, clock: int) -> int:
        """How many steps the period has that begins at ``clock``."""
        local = self.local
        if self._every is None:
            return local.every
        steps = self._every(clock)
        if isinstance(steps, bool) or not isinstance(steps, int) or steps <= local.delay:
            raise ValueError(
                f"every({clock}) returned {steps!r}; it must be an integer, at least 1 and more than delay, which is "
                f"{local.delay}"
            )
        return steps

    def step(self, steps: int = 1) -> None:
        """After so many local steps: the exchanges that end and begin then."""
        self.clock += steps
        clock = self.clock
        for fragment in self.fragments:
            if fragment.ends is not None and clock >= fragment.ends:
                self.end(fragment)
        if self._times is not None:
            collectives = self.engine.collectives
            present = [bool(self._times(rank, clock)) for rank in range(collectives.size())]
            if any(present):
                self.exchange(self.fragments[0], present[collectives.rank()])
            return
        for fragment in self.fragments:
            if clock >= fragment.due:
                fragment.due = clock + self._period(clock)
                self.exchange(fragment)

    def sync(self) -> None:
        """Ends all exchanges in flight, and exchanges what has been done since then."""
        for fragment in self.fragments:
            if fragment.ends is not None:
                self.end(fragment)
        apart = self._times is not None or self.local.mix is not None
        for fragment in self.fragments:
            if apart or self.clock > fragment.began:
                self.exchange(fragment, delay=0)
                fragment.due = self.clock + self._period(self.clock)

    # Exchanges

    def exchange(self, fragment: Fragment[G], present: bool = True, delay: int | None = None) -> None:
        """Begins an exchange, and ends it if there is no delay.

        Args:
            present: whether this rank sends its update. All others send nothing.
            delay: None: that of the settings.
        """
        self.check_parameters()
        delay = self.local.delay if delay is None else delay
        engine = self.engine
        engine.stats.begin_step()
        updates = {n: self.update(n) for n in fragment.numbers} if present else {}
        together = self._meet(fragment, self.finite(updates.values()))
        steps, fragment.began = self.clock - fragment.began, self.clock
        engine.stats.add(dense=steps * self._dense_bytes(fragment))
        if not together:
            self._discard(fragment, present)
            engine.stats.end_step()
            return
        if present:
            engine.decay([self.parameters[n] for n in fragment.numbers], self.local.decay)
        else:
            updates = {n: self.nothing(n) for n in fragment.numbers}
        engine.feedback = present
        try:
            self._start(fragment, updates)
        finally:
            engine.feedback = True
        fragment.present = present
        fragment.ends = self.clock + delay
        if not delay:
            self.end(fragment)
        elif self.local.mix is None:
            fragment.starts = {n: self.copy(n) for n in fragment.numbers}
        else:
            fragment.keeps = self.local.mix

    def _meet(self, fragment: Fragment[G], finite: bool) -> bool:
        """Compares the ranks; returns whether the updates of all of them are finite."""
        engine = self.engine
        said: list[bool] = []
        self.meet(
            engine.word(self.agreed, not finite),
            f"local.{self.parameters[fragment.numbers[0]].name}",
            lambda total: said.append(engine.hear(total, self._compare_ranks)),
        )
        return said[0]

    def _compare_ranks(self) -> None:
        """The handshake, and the comparison of the anchors.

        Raises:
            MismatchError: they differ; on all ranks.
        """
        collectives = self.engine.collectives
        self.engine.agree([(p.name, p.shape, p.dtype) for p in self.parameters])
        anchors = (np.ascontiguousarray(self.anchor_values(parameter.number)) for parameter in self.parameters)
        sums = [zlib.crc32(anchor.data) for anchor in anchors]
        own = np.array([self.clock, zlib.crc32(self.about_outer().encode()), *sums], np.int64)
        told = collectives.allgather(own.view(np.uint8), "anchors")
        if told.size != collectives.size() * own.nbytes:
            raise MismatchError("ranks of this job use LocalSGD with different models: give it the same on all ranks")
        rows = told.view(np.int64).reshape(collectives.size(), own.size)
        apart = [place for place in range(own.size) if (rows[:, place] != rows[0, place]).any()]
        if apart:
            place = apart[0]
            rank = int(np.flatnonzero(rows[:, place] != rows[0, place])[0])
            parameter = self.parameters[max(0, place - 2)]
            what = f"the parameter {parameter.known_as or parameter.name} has other values"
            if place < 2:
                what = ["LocalSGD has taken another number of steps", "the outer optimizer has other settings"][place]
            raise MismatchError(
                f"on rank {rank}, {what} than on rank 0. Every rank must begin with the same parameters and settings: "
                f"{self.advice}, make LocalSGD with the same arguments, and take the same number of steps on all ranks"
            )
        self.agreed = True

    def _start(self, fragment: Fragment[G], updates: Mapping[int, G]) -> None:
        engine, small = self.engine, {}
        for number, update in updates.items():
            parameter = self.parameters[number]
            if self._small(parameter) or engine.config.sends_all_as_it_is:
                small[number] = update
                engine.count_allreduce(parameter.numel * parameter.accumulated_in.itemsize, 0)
            else:
                fragment.tickets.append(fragment.reducer.start(parameter, update))
            fragment.updates[number] = update
        if small:
            fragment.small = self.start_small(small)

    def _small(self, parameter: Parameter) -> bool:
        """Whether the parameter's updates are too small to be compressed."""
        return self.engine.uncompressed(parameter, parameter.numel, parameter.accumulated_in.itemsize)

    def _dense_bytes(self, fragment: Fragment[G]) -> int:
        """What a rank would send in a step that reduces the fragment's gradients dense."""
        size = sum(self._nbytes[number] for number in fragment.numbers)
        return traffic.allreduce(size, self.engine.collectives.size()).sent

    def end(self, fragment: Fragment[G]) -> None:
        """Waits for an exchange, takes the outer step, and lets the local parameters follow."""
        tickets, small = fragment.tickets, fragment.small
        fragment.tickets, fragment.small, fragment.ends = [], None, None
        for ticket in tickets:
            fragment.reducer.finish(ticket, 1 / self.engine.collectives.size())
        if small is not None:
            fragment.updates.update(self.finish_small(small))
        self.outer_step(fragment)
        fragment.updates = {}
        if fragment.present:
            self._follow(fragment)
        self.engine.stats.end_step()

    def _follow(self, fragment: Fragment[G]) -> None:
        starts, keeps = fragment.starts, fragment.keeps
        fragment.starts, fragment.keeps = {}, 0.0
        if self.clock == fragment.began:  # nothing was done since: no rounding error either
            starts = {}
        for number in fragment.numbers:
            self.follow(number, starts.get(number), keeps)

    def _discard(self, fragment: Fragment[G], present: bool) -> None:
        """A rank has an update that is not finite: all go back to the anchor."""
        _log.warning(
            "a rank has NaN or infinity in its parameters after local step %d: all ranks continue from their last "
            "exchange", self.clock,
        )  # fmt: skip
        if present:
            self._follow(fragment)
            self.renew(fragment.numbers)

    # State

    def counts(self) -> dict[str, Any]:
        """The step counts, for ``restore_counts``."""
        return {
            "clock": self.clock,
            "due": [fragment.due for fragment in self.fragments],
            "began": [fragment.began for fragment in self.fragments],
        }

    def restore_counts(self, state: Mapping[str, Any]) -> None:
        """Continues with step counts that ``check_counts`` has found to be such."""
        self.clock = state["clock"]
        for fragment, due, began in zip(self.fragments, state["due"], state["began"], strict=True):
            fragment.due, fragment.began = due, began

    def check_counts(self, state: object, keys: set[str], lists: Sequence[str] = ("due", "began")) -> None:
        """
        Args:
            keys: that the state must have besides the step counts.
            lists: of step counts by fragment.

        Raises:
            ValueError: this is not a state of LocalSGD with these fragments.
        """
        keys = keys | self.counts().keys()
        if not isinstance(state, Mapping) or not keys <= state.keys():
            raise ValueError(f"this is not a state of LocalSGD: it must have {', '.join(sorted(keys))}")
        counts = [state[key] for key in lists]
        if not all(isinstance(one, list) and all(map(_is_count, one)) for one in [*counts, [state["clock"]]]):
            raise ValueError("the step counts of the state must be integers, 0 or more")
        if any(len(one) != len(self.fragments) for one in counts):
            raise ValueError(
                f"the state is of {len(state['due'])} fragments, and the settings are of {len(self.fragments)}: use "
                "the settings with which it was saved"
            )

    def check_idle(self, call: str) -> None:
        """
        Raises:
            RuntimeError: an exchange is in flight.
        """
        if any(fragment.ends is not None for fragment in self.fragments):
            raise RuntimeError(
                f"{call} was called while an exchange is in flight (delay is {self.local.delay}): call sync() on all "
                "ranks before"
            )

    def forget(self) -> None:
        """Forgets exchanges in flight. The ranks are compared again at the next one."""
        self.agreed = False
        for fragment in self.fragments:
            fragment.tickets, fragment.small, fragment.updates = [], None, {}
            fragment.ends, fragment.starts, fragment.keeps = None, {}, 0.0


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def with_local(
    config: str | Path | Mapping[str, Any] | Config | None,
    local: Mapping[str, Any],
    settings: dict[str, Any],
    times: Times | None = None,
) -> Config:
    """A config for LocalSGD.

    Args:
        config: as ``Config.load``.
        local: arguments of LocalSGD, in place of settings in the config's key of this name; None: not given. A function
            for ``every`` is no setting.
        settings: keys of the config, in place of its own.
        times: that of LocalSGD.

    Raises:
        ValueError: ``times`` is given with another setting of when ranks exchange.
    """
    given = settings.pop("local", None) or {}
    if isinstance(given, LocalUpdates):
        given = given.model_dump()
    function = callable(local.get("every"))
    changes = {
        **given,
        **{key: value for key, value in local.items() if value is not None and not (function and key == "every")},
    }
    loaded = Config.load(Config.load(config, **settings), local=changes)
    chosen = loaded.local or LocalUpdates()
    if times is not None and (local.get("every") is not None or chosen.fragments > 1 or chosen.delay):
        raise ValueError("times is given beside every, fragments or delay: leave these out, or leave times out")
    return loaded
