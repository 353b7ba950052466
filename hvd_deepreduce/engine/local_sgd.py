"""Local updates without a framework: the schedule of the exchanges, and what is done in one.

The state of a rank: its own parameters, and the anchor, which is the same on all ranks, bit for bit. An adapter keeps
both, with the outer optimizer, and implements the methods of ``LocalExchanges`` that are abstract.
"""

from __future__ import annotations

import logging
import operator
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic

import numpy as np

from hvd_deepreduce.codecs.interfaces import Floats
from hvd_deepreduce.config import Config
from hvd_deepreduce.config.local_sgd import LocalUpdates
from hvd_deepreduce.engine import step_check
from hvd_deepreduce.engine.agreement import MismatchError
from hvd_deepreduce.engine.collectives import Collectives
from hvd_deepreduce.engine.engine import Engine
from hvd_deepreduce.engine.fragments import FRAGMENT_COUNTS, Fragment, divided
from hvd_deepreduce.engine.parameter import Parameter
from hvd_deepreduce.engine.reducer import Reducer
from hvd_deepreduce.engine.tensors import Device, G, Tensors
from hvd_deepreduce.exchange import traffic

_log = logging.getLogger("hvd_deepreduce")

Every = int | Callable[[int], int]
Times = Callable[[int, int], bool]
NOT_IN_STATE = (
    "in an elastic job LocalSGD must be a part of the state, because a new rank has to take the others' anchor and "
    "step counts. On PyTorch write: state = hvd.elastic.TorchState(model=model, optimizer=local_sgd, ...); on "
    "TensorFlow, with hvd_deepreduce.tensorflow.elastic: state = KerasState(model, compression=local_sgd, ...). "
    "Nothing was exchanged"
)

MEETING = "local"
"""Name of all meetings: a rank that comes to another exchange must meet the others, too."""
STAY_TOGETHER = (
    "LocalSGD's clock counts local steps. On all ranks, take the same number of steps, call sync() after the same one, "
    "let a function for every return the same, and load the states of one checkpoint"
)


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
        times: whether this rank takes part in an exchange after its step number ``clock``, in place of a period. Then
            ``every`` is the largest gap between two exchanges of this rank; None: any.

    Attributes:
        local: settings.
        parameters: as given.
        engine: this rank's compression.
        fragments: of the model.
        clock: local steps so far.
        agreed: whether the ranks have been compared.
        in_state: whether the state of an elastic job has synchronized this rank.
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
        self.in_state = False
        self._every = every if callable(every) else None
        self._times = times
        self._bounded = every is not None
        self._nbytes = nbytes

        def fragment(place: int, numbers: list[int]) -> Fragment[G]:
            def expected() -> list[tuple[Parameter, Device]]:
                where = devices()
                return [(self.parameters[number], where[number]) for number in numbers]

            return Fragment(numbers, Reducer(self.engine, tensors, expected, numbers[0], place, self._small))

        groups = divided(self.parameters, self.local.fragments)
        self.fragments = [fragment(place, numbers) for place, numbers in enumerate(groups)]
        first, count = self._period(0), len(self.fragments)
        for place, one in enumerate(self.fragments):
            one.due = first - first * (count - 1 - place) // count

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
        try:
            period = 0 if isinstance(steps, bool) else operator.index(steps)
        except TypeError:
            period = 0
        if period <= local.delay:
            raise ValueError(
                f"every({clock}) returned {steps!r}; it must be an integer, at least 1 and more than delay, which is "
                f"{local.delay}"
            )
        return period

    def step(self, steps: int = 1) -> None:
        """After so many local steps: the exchanges that end and begin then."""
        self.clock += steps
        clock = self.clock
        for fragment in self.fragments:
            if fragment.ends is not None and clock >= fragment.ends:
                self.end(fragment)
        if self._times is not None:
            (fragment,) = self.fragments
            wanted = bool(self._times(self.engine.collectives.rank(), clock))
            self.exchange(fragment, "step", wanted or (self._bounded and clock >= fragment.due))
            return
        for fragment in self.fragments:
            if clock >= fragment.due:
                self.exchange(fragment, "step")

    def sync(self) -> None:
        """Ends all exchanges in flight, and exchanges what has been done since then."""
        in_flight = [(one.ends, place) for place, one in enumerate(self.fragments) if one.ends is not None]
        for _, place in sorted(in_flight):  # as ``step`` ends them
            self.end(self.fragments[place])
        apart = self._times is not None or self.local.mix is not None
        for fragment in self.fragments:
            if apart or self.clock > fragment.began:
                self.exchange(fragment, "sync", delay=0)

    # Exchanges

    def exchange(self, fragment: Fragment[G], call: str, present: bool = True, delay: int | None = None) -> None:
        """Begins an exchange if a rank is present, and ends it if there is no delay.

        Args:
            call: by which the user came here.
            present: whether this rank sends its update, and takes the anchor. All others send nothing.
            delay: None: that of the settings.
        """
        self.check_parameters()
        if self.engine.collectives.elastic() and not self.in_state:
            raise RuntimeError(NOT_IN_STATE)
        delay = self.local.delay if delay is None else delay
        engine = self.engine
        due = self.clock + self._period(self.clock) if present else fragment.due
        if self._times is None:  # else there may be no exchange
            engine.stats.begin_step()
        updates = {n: self.update(n) for n in fragment.numbers} if present else {}
        heard = self._meet(fragment, call, due, self.finite(updates.values()), present)
        if not heard.sending:
            return
        engine.stats.begin_step()
        fragment.due = due
        steps, fragment.began = self.clock - fragment.began, self.clock
        engine.stats.add(dense=steps * self._dense_bytes(fragment))
        if heard.discarding:
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

    def _meet(self, fragment: Fragment[G], call: str, due: int, finite: bool, present: bool) -> step_check.Outcome:
        """Compares the ranks.

        Args:
            call, present: as for ``exchange``.
            due: the fragment's, if there is an exchange.
            finite: whether this rank's updates are.
        """
        engine = self.engine
        numbers = [place for place, one in enumerate(self.fragments) if one is fragment]
        place: dict[str, int | str] = {
            "clock": self.clock, "call": call, "fragment": numbers[0], "outer_steps": fragment.outer_steps
        }  # fmt: skip
        if self._times is None:
            # Already at the exchange where the periods part: no other one is in flight that could wait for its end.
            place["next_exchange"] = " ".join(str(due if one is fragment else one.due) for one in self.fragments)
        said: list[step_check.Outcome] = []

        def hear(total: Floats) -> None:
            heard = step_check.outcome(total, engine.collectives.size())
            engine.hear(total, partial(self._compare_ranks, heard.same_place), STAY_TOGETHER)
            said.append(heard)

        try:
            self.meet(engine.word(self.agreed, not finite, place, present), MEETING, hear)
        except Exception:
            engine.collectives.complete()
            raise
        return said[0]

    def _compare_ranks(self, same_place: bool) -> None:
        """The handshake, and the comparison of the anchors.

        Args:
            same_place: whether the ranks are at the same place.

        Raises:
            MismatchError: they differ; on all ranks.
        """
        collectives = self.engine.collectives
        self.engine.agree([(p.name, p.shape, p.dtype) for p in self.parameters])
        if not same_place:
            self.engine.compare_places(STAY_TOGETHER)
        anchors = (np.ascontiguousarray(self.anchor_values(parameter.number)) for parameter in self.parameters)
        sums = [zlib.crc32(anchor.data) for anchor in anchors]
        own = np.array([zlib.crc32(self.about_outer().encode()), *sums], np.int64)
        told = collectives.allgather(own.view(np.uint8), "anchors")
        if told.size != collectives.size() * own.nbytes:
            raise MismatchError("ranks of this job use LocalSGD with different models: give it the same on all ranks")
        rows = told.view(np.int64).reshape(collectives.size(), own.size)
        apart = [place for place in range(own.size) if (rows[:, place] != rows[0, place]).any()]
        if apart:
            place = apart[0]
            rank = int(np.flatnonzero(rows[:, place] != rows[0, place])[0])
            parameter = self.parameters[max(0, place - 1)]
            what = f"the parameter {parameter.known_as or parameter.name} has other values"
            if place == 0:
                what = "the outer optimizer has other settings"
            raise MismatchError(
                f"on rank {rank}, {what} than on rank 0. Every rank must begin with the same parameters and settings: "
                f"{self.advice}, make LocalSGD with the same arguments, and load the states of one checkpoint"
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
        try:
            for ticket in tickets:
                fragment.reducer.finish(ticket, 1 / self.engine.collectives.size())
            if small is not None:
                fragment.updates.update(self.finish_small(small))
        except Exception:
            fragment.reducer.complete()
            self.engine.collectives.complete()
            raise
        with self.engine.receiving():  # all ranks do the same
            self.outer_step(fragment)
            fragment.outer_steps += 1
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
        of_fragments = {key: [getattr(one, key) for one in self.fragments] for key in FRAGMENT_COUNTS}
        return {"clock": self.clock, **of_fragments}

    def restore_counts(self, state: Mapping[str, Any]) -> None:
        """Continues with step counts that ``check_counts`` has found to be such. The ranks are compared again at the
        next exchange: another one may have loaded another anchor, or none."""
        self.agreed = False
        self.clock = state["clock"]
        for place, fragment in enumerate(self.fragments):
            fragment.due, fragment.began, fragment.outer_steps = (state[key][place] for key in FRAGMENT_COUNTS)

    def check_counts(self, state: object, keys: set[str]) -> None:
        """
        Args:
            keys: that the state must have besides the step counts.

        Raises:
            ValueError: this is not a state of LocalSGD with these fragments.
        """
        keys = keys | self.counts().keys()
        if not isinstance(state, Mapping) or not keys <= state.keys():
            raise ValueError(f"this is not a state of LocalSGD: it must have {', '.join(sorted(keys))}")
        counts = [state[key] for key in FRAGMENT_COUNTS]
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
        TypeError: ``times`` is no function.
        ValueError: it is given with fragments or a delay.
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
    if times is not None and not callable(times):
        raise TypeError(f"times is {type(times).__name__}, but it must be a function of rank and clock")
    if times is not None and (chosen.fragments > 1 or chosen.delay):
        raise ValueError("times is given beside fragments or delay: leave these out, or leave times out")
    return loaded
