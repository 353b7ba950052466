"""What one rank of a job with local updates keeps: anchors, fragments and step counts, and the state of these."""

from __future__ import annotations

import logging
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, Generic

import numpy as np

from hvd_deepreduce.codecs.interfaces import Floats
from hvd_deepreduce.engine.engine import Engine
from hvd_deepreduce.engine.fragments import FRAGMENT_COUNTS, Fragment, divided
from hvd_deepreduce.engine.local_options import Options
from hvd_deepreduce.engine.parameter import Parameter
from hvd_deepreduce.engine.rank_state import ElasticState, Snapshot
from hvd_deepreduce.engine.reducer import Reducer
from hvd_deepreduce.engine.state import Reshard
from hvd_deepreduce.engine.tensors import Device, G, Tensors
from hvd_deepreduce.exchange.collectives import Collectives
from hvd_deepreduce.wire.quoting import quoted

_log = logging.getLogger("hvd_deepreduce")
WITHIN = (
    "the states were saved within a period: what the other ranks had done since their last exchange is lost. Call "
    "sync() on all ranks before states are saved for another number of ranks"
)


class LocalState(ABC, Generic[G]):
    """One rank's state. ``LocalExchanges`` adds the exchanges.

    Args:
        options: settings, and functions for the periods and the times.
        collectives: of the ranks that take part.
        parameters: those that are trained, with their positions in this list as numbers.
        nbytes: of each parameter.
        sizes: elements of each parameter in the whole model, of which this rank may hold a part, or none; by these the
            model is divided into fragments. None: those of ``parameters``.
        tensors: the framework's.

    Attributes:
        local: settings.
        parameters, collectives: as given.
        engine: this rank's compression.
        fragments: of the model.
        clock: local steps so far.
        tensors_of: the framework's.
        begun: whether there was a step, or a state was loaded.
        agreed: whether the ranks have been compared.
        in_state: whether the state of an elastic job has synchronized this rank.
        anchors: by parameter, float64 where that is, otherwise float32; empty before ``begin``.
        bases: with ``times``, the anchors that this rank took last; otherwise empty.
        outer: the optimizer of the anchor; None before ``begin``.
    """

    advice: str
    """What to call so that all ranks begin with the same parameters."""
    keys: tuple[str, ...]
    """Of a state, besides the step counts and the anchors."""
    flat = False
    """Whether a state's anchors are flat arrays."""
    kind = "LocalSGD"
    """The class whose state it is, for errors."""
    has_anchors = True
    """Whether there are anchors beside the parameters."""

    def __init__(
        self,
        options: Options,
        collectives: Collectives,
        parameters: Sequence[Parameter],
        nbytes: Sequence[int],
        tensors: Tensors[G],
        sizes: Sequence[int] | None = None,
    ) -> None:
        self.local = options.in_force
        self.parameters = list(parameters)
        self.collectives: Any = collectives
        self.engine = Engine(options.config, collectives, parameters, [p.known_as or p.name for p in parameters])
        self.clock = 0
        self.begun = self.agreed = self.in_state = False
        self.anchors: list[Any] = []
        self.bases: list[Any] = []
        self.outer: Any = None
        # By number, what is not trained now: the clock of the last step in which it was.
        self._frozen: dict[int, int] = {}
        self._every = options.every if callable(options.every) else None
        self._times = options.times
        self._bounded = options.every is not None
        self._nbytes = nbytes
        self.tensors_of = tensors

        def fragment(place: int, numbers: list[int]) -> Fragment[G]:
            def expected() -> list[tuple[Parameter, Device]]:
                return [(self.parameters[number], self.device(number)) for number in self.held(numbers)]

            return Fragment(numbers, Reducer(self.engine, tensors, expected, numbers[0], place, dense=self._dense))

        groups = divided(sizes or [one.numel for one in self.parameters], self.local.fragments)
        self.fragments = [fragment(place, numbers) for place, numbers in enumerate(groups)]
        self._spread()

    def held(self, numbers: Iterable[int]) -> list[int]:
        """Of these parameters, those of which this rank holds elements."""
        return [number for number in numbers if self.parameters[number].numel]

    def begin(self) -> None:
        """Takes the parameters as the anchor, unless there is one."""
        if not self.anchors:
            self.anchors, self.outer = self.new_anchors()
            self.bases = [] if self._times is None else self.new_anchors()[0]

    def begin_anew(self) -> None:
        """Takes the parameters as the anchor again. The ranks are compared again at the next exchange. What the
        residuals have is dropped: it is of other parameters."""
        self.move_anchors()
        self.decay(self.held(range(len(self.parameters))), 0.0)
        self.agreed = False

    def move_anchors(self) -> None:
        """To the parameters; the outer optimizer may begin anew."""
        self.anchors, self.bases = [], []
        self.begin()

    # What the framework does

    @abstractmethod
    def new_anchors(self) -> tuple[list[Any], Any]:
        """Copies of the parameters, in the anchor's dtype, and an optimizer for them."""

    @abstractmethod
    def values(self, anchor: Any) -> Floats:
        """The values of an anchor, or of one in a state, on the host."""

    @abstractmethod
    def outer_state(self) -> dict[str, Any]:
        """The state of the outer optimizer."""

    @abstractmethod
    def restoring(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Prepares to go on with anchors and outer optimizer of a state, and returns what does it.

        Raises:
            ValueError: the optimizer's is of another model or optimizer. Nothing has changed then.
        """

    @abstractmethod
    def mean_of(self, number: int, saved: Any) -> G:
        """A mean of updates in a state, as the exchange had given it."""

    @abstractmethod
    def copy_of(self, number: int, saved: Any) -> Any:
        """A parameter's values in a state, as ``LocalExchanges.copy`` had given them."""

    @abstractmethod
    def settle(self) -> None:
        """Lets exchanges in flight go on until their means are there, which are applied when they are due."""

    def device(self, number: int) -> Device:
        """Where the parameter is; None: on the host."""
        return None

    def in_order(self, number: int) -> AbstractContextManager[Any]:
        """Inside, what is done with the parameter's residual is in order with the framework's current stream."""
        return self.tensors_of.stream(self.device(number))

    def decay(self, numbers: Iterable[int], factor: float) -> None:
        """As ``Engine.decay``, of these parameters."""
        for number in numbers if factor != 1.0 else ():
            with self.in_order(number):
                self.engine.decay([self.parameters[number]], factor)

    def saved(self, number: int, values: Any) -> Any:
        """An anchor, a mean or a copy of a parameter in a state, in the anchor's dtype; it does not change any more."""
        return self.values(values)

    def pack(self, state: dict[str, Any]) -> dict[str, Any]:
        """The engine's state as a part of this one."""
        return state

    def unpack(self, state: Any) -> Any:
        """What ``pack`` was given."""
        return state

    # Schedule

    def _spread(self) -> None:
        """Lets the next exchanges of the fragments be apart, the last one a whole period from now."""
        first, count = self.period(self.clock), len(self.fragments)
        for place, one in enumerate(self.fragments):
            one.due = self.clock + first - first * (count - 1 - place) // count

    def period(self, clock: int) -> int:
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

    def _dense(self, parameter: Parameter) -> bool:
        """Whether the parameter's updates are summed as they are: all, or since it is too small to be compressed."""
        small = self.engine.uncompressed(parameter, parameter.numel, parameter.accumulated_in.itemsize)
        return small or self.engine.config.sends_all_as_it_is

    # State

    def counts(self) -> dict[str, Any]:
        """The step counts, for ``restore_counts``."""
        of_fragments = {key: [getattr(one, key) or 0 for one in self.fragments] for key in FRAGMENT_COUNTS}
        return {"clock": self.clock, **of_fragments}

    def restore_counts(self, state: Mapping[str, Any]) -> None:
        """Continues with step counts that ``check_counts`` has found to be such. The ranks are compared again at the
        next exchange: another one may have loaded another anchor, or none."""
        self.agreed = False
        self.clock = state["clock"]
        for place, fragment in enumerate(self.fragments):
            fragment.due, fragment.began, fragment.outer_steps, ends = (state[key][place] for key in FRAGMENT_COUNTS)
            fragment.ends = ends or None
            if self._every is None:  # it may be a shorter one than that of the state
                fragment.due = min(fragment.due, self.clock + self.local.every)

    def check_counts(self, state: object, keys: set[str]) -> None:
        """
        Args:
            keys: that the state must have besides the step counts.

        Raises:
            ValueError: this is not such a state, with these fragments.
        """
        keys = keys | self.counts().keys()
        if not isinstance(state, Mapping) or not keys <= state.keys():
            raise ValueError(f"this is not a state of {self.kind}: it must have {', '.join(sorted(keys))}")
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
            fragment.forget()

    def local_state(self) -> dict[str, Any]:
        """Everything but the residuals."""

        def by_name(given: Mapping[int, Any]) -> dict[str, Any]:
            return {self.parameters[number].name: self.saved(number, one) for number, one in given.items()}

        self.begin()
        of_fragments = [fragment for fragment in self.fragments if fragment.ends is not None]
        return {
            **self.counts(), "anchors": by_name(dict(enumerate(self.anchors))),
            "bases": by_name(dict(enumerate(self.bases))), **self.outer_state(),
            "means": by_name({number: one for each in of_fragments for number, one in each.updates.items()}),
            "starts": by_name({number: one for each in of_fragments for number, one in each.starts.items()}),
            "unsent": by_name({number: one for each in of_fragments for number, one in each.unsent.items()}),
            "frozen": {self.parameters[number].name: clock for number, clock in self._frozen.items()},
            "resting": [self.parameters[number].name for each in of_fragments for number in sorted(each.resting)],
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Anchor, outer optimizer, residuals and step counts, and of exchanges in flight the means, for which this
        waits: all ranks call it after the same step.

        Raises:
            ContainerError: of an exchange in flight.
            RuntimeError: an exchange has failed; or ``close`` was called.
        """
        self.engine.check_open()
        self.settle()
        return {**self.pack(self.engine.state_dict()), **self.local_state()}

    def load_state_dict(self, state: Any, reshard: Reshard = False, own: Any = None) -> None:
        """Continues where ``state_dict`` was called.

        Args:
            state: what that returned; with ``reshard``, those of all ranks, of which one is needed at a time.
            own: with ``reshard``, the one whose anchor and step counts are taken; None: the first.

        Raises:
            RuntimeError: an exchange is in flight.
            ValueError: as ``LocalSGD.load_state_dict``; nothing has changed then.
        """
        self.check_idle("load_state_dict")
        if reshard is True:  # the outer step takes the mean of what the residuals have, at a learning rate of its own
            reshard = "mean"
        if reshard is False:
            own = state
        elif isinstance(state, Mapping) or not isinstance(state, Iterable):
            self.engine.load_state_dict(state, reshard=reshard)  # which says what is wrong
            return
        else:
            states = iter(state)
            first = next(states, None)
            if own is None and isinstance(first, Mapping) and any(first.get("ends") or ()):
                raise ValueError(
                    "the states were saved while exchanges were in flight, of which each rank has a part of its own: "
                    "to load them on another number of ranks, call sync() on all ranks before they are saved"
                )
            own = first if own is None else own
            state = map(self._checked, chain([first], states))
        self._checked(own)
        restore = self.restoring(own)
        self.engine.load_state_dict(self._checked(state) if reshard is False else state, reshard=reshard)
        self._restore(restore, own)
        lost = reshard is not False and self.unpack(own)["size"] > self.collectives.size()
        if lost and any(began < own["clock"] for began in own["began"]):
            _log.warning(WITHIN)

    def _checked(self, state: Any) -> Any:
        """
        Returns:
            The engine's state in that of ``state_dict``.

        Raises:
            ValueError: this is not what ``state_dict`` returns, for this model and these fragments.
        """
        self.check_counts(state, {"anchors", "bases", "means", "starts", *self.keys})
        expected = {p.name: ((p.numel,) if self.flat else p.shape, p.accumulated_in) for p in self.parameters}
        for what in ("anchor", "base")[: 2 if state["bases"] else 1]:
            self.check_arrays(f"the {what}", state[f"{what}s"], expected if self.has_anchors else {})
        in_flight = [n for one, ends in zip(self.fragments, state["ends"], strict=True) if ends for n in one.numbers]
        sent, held = (
            {self.parameters[n].name: expected[self.parameters[n].name] for n in numbers}
            for numbers in (self.held(in_flight), in_flight)
        )
        self.check_arrays("the mean update of", state["means"], sent)
        self.check_arrays("the copy of", state["starts"], held if self.local.mix is None else {})
        unsent = _unsent(state)
        names = set(unsent) & set(state["starts"]) if isinstance(unsent, Mapping) else ()
        self.check_arrays("the unsent progress of", unsent, {name: held[name] for name in names})
        frozen, resting = _frozen(state)
        if not (isinstance(frozen, Mapping) and isinstance(resting, list) and all(map(_is_count, frozen.values()))):
            raise ValueError("what the state has frozen must be step counts by name, and what rests, a list of names")
        if unknown := {*map(str, frozen), *map(str, resting)} - expected.keys():
            raise ValueError(f"the state has frozen {quoted(min(unknown))}, which this model does not have")
        return self.unpack(state)

    def check_arrays(
        self, what: str, given: Any, expected: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
    ) -> None:
        """
        Raises:
            ValueError: these are not finite arrays with the expected names, shapes and dtypes.
        """
        if not isinstance(given, Mapping) or given.keys() != expected.keys():
            raise ValueError(
                f"{what.removesuffix(' of')} of the state is of another model, of another outer optimizer, or of "
                "settings with or without mix: load the state of this model, with the settings with which it was saved"
            )
        for name, (shape, dtype) in expected.items():
            try:
                one = self.values(given[name])
            except (AttributeError, TypeError):
                raise ValueError(f"{what} {name} of the state is a {type(given[name]).__name__}") from None
            if one.shape != shape or one.dtype != dtype:
                raise ValueError(
                    f"{what} {name} of the state is {one.dtype} {list(one.shape)}; it must be {dtype} {list(shape)}"
                )
            if not np.isfinite(one).all():
                raise ValueError(f"{what} {name} of the state contains NaN or infinity: load an older state")

    def _restore(self, restore: Callable[[], None], state: Mapping[str, Any]) -> None:
        self.forget()
        restore()
        self.begun = True
        self.restore_counts(state)
        numbers = {parameter.name: number for number, parameter in enumerate(self.parameters)}
        frozen, resting = _frozen(state)
        self._frozen = {number: frozen[name] for name, number in numbers.items() if name in frozen}
        for fragment in self.fragments:
            if fragment.ends is not None:
                names = {number: self.parameters[number].name for number in fragment.numbers}
                means, starts = state["means"], state["starts"]
                fragment.updates = {n: self.mean_of(n, means[name]) for n, name in names.items() if name in means}
                fragment.starts = {n: self.copy_of(n, starts[name]) for n, name in names.items() if name in starts}
                unsent = _unsent(state)
                fragment.unsent = {n: self.mean_of(n, unsent[name]) for n, name in names.items() if name in unsent}
                fragment.keeps = self.local.mix or 0.0
                fragment.resting = {number for number, name in names.items() if name in resting}

    def snapshot(self) -> Snapshot:
        """Settings and state of this process, for ``rewind``.

        Raises:
            RuntimeError: an exchange is in flight.
        """
        self.check_idle("commit")
        return Snapshot(self.engine.config, self.state_dict())

    def rewind(self, snapshot: Snapshot) -> None:
        """Returns to a state of this process, whatever its rank is now. Exchanges in flight are forgotten."""
        self.engine.rewind(Snapshot(snapshot.config, self.unpack(snapshot.state)))
        self._restore(self.restoring(snapshot.state), snapshot.state)

    def elastic_state(self) -> tuple[ElasticState, dict[str, Any]]:
        """What the other ranks of an elastic job take from rank 0: everything but the residuals."""
        self.check_idle("sync of an elastic state")
        return self.engine.elastic_state(), self.local_state()

    def sync_from_root(self, told: tuple[ElasticState, dict[str, Any]]) -> None:
        """Takes what rank 0 has told; keeps the residuals if the step is the same."""
        config, state = self.engine.state_from_root(told[0])
        self.rewind(Snapshot(config, {**self.pack(state), **told[1]}))
        self.in_state = True

    def close(self) -> None:
        """Ends the exchanges, and frees everything but the model."""
        self.engine.close()
        self.anchors, self.bases, self.outer = [], [], None


def _unsent(state: Mapping[str, Any]) -> Any:
    """States that were saved before there was any have none."""
    return state.get("unsent", {})


def _frozen(state: Mapping[str, Any]) -> tuple[Any, Any]:
    """What was frozen and what was resting; earlier states say neither."""
    return state.get("frozen", {}), state.get("resting", [])


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
