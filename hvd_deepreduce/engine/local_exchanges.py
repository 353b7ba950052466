"""Local updates without a framework: the schedule of the exchanges, and what is done in one.

The state of a rank (``local_state.py``): its own parameters, and the anchor, which is the same on all ranks, bit for
bit. An adapter reads and writes the parameters: it implements the abstract methods of ``LocalExchanges``.
"""

from __future__ import annotations

import logging
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import numpy as np

from hvd_deepreduce.codecs.interfaces import Floats
from hvd_deepreduce.engine.fragments import Fragment
from hvd_deepreduce.engine.local_state import LocalState
from hvd_deepreduce.engine.peers import Peers
from hvd_deepreduce.engine.step_check import Outcome
from hvd_deepreduce.engine.tensors import G
from hvd_deepreduce.exchange import traffic
from hvd_deepreduce.exchange.statements import MismatchError

_log = logging.getLogger("hvd_deepreduce")
T = TypeVar("T")

NOT_IN_STATE = (
    "in an elastic job LocalSGD must be a part of the state, because a new rank has to take the others' anchor and "
    "step counts. On PyTorch write: state = hvd.elastic.TorchState(model=model, optimizer=local_sgd, ...); on "
    "TensorFlow, with hvd_deepreduce.tensorflow.elastic: state = KerasState(model, compression=local_sgd, ...). "
    "Nothing was exchanged"
)

STEP_CHECK = "local"
"""Name of all step checks: a rank that comes to another exchange must meet the others, too."""
STAY_TOGETHER = (
    "LocalSGD's clock counts local steps. On all ranks, take the same number of steps, call sync() after the same one, "
    "let a function for every return the same, and load the states of one checkpoint"
)


class LocalExchanges(LocalState[G]):
    """The exchanges of one rank: ``step`` and ``sync`` begin and end them.

    The arguments are those of ``LocalState``.

    Attributes:
        awaited: what the other ranks wait for first: this rank's ``step check`` or ``containers``, or its ``next`` step
            check.
        peers: through which exchanges go, among peers that come and go; None: all ranks exchange together.
    """

    awaited = "next"
    peers: Peers[G] | None = None
    not_finite = "parameters after local step %d: it continues from the anchor"
    """For the log, with the clock."""

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
    def check_step(self, vote: Floats, name: str, tally: Callable[[Floats], object]) -> None:
        """Calls ``tally`` with the sum of all ranks' votes. Until ``agreed`` is set, it waits only for a limited
        time."""

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
    def about_outer(self) -> str:
        """Name and settings of the outer optimizer; the same text on all ranks."""

    def together(self) -> AbstractContextManager[None]:
        """Around what the ranks of a replica do together, where several ranks hold parts of it: an error of one of them
        becomes an error of all."""
        return nullcontext()

    def anywhere(self, flag: bool) -> bool:
        """Whether any rank of this replica says so; called within ``together``."""
        return flag

    # For ``peers``

    leads = sends = True
    """Whether this rank is the first one of its peer; and whether it sends messages."""
    ranks_of_peer = 1
    """Of a peer whose ranks hold different parts of the model, how many."""

    def told(self, find: Callable[[], T]) -> T:
        """What the first rank of this peer finds, in JSON's types, on all of its ranks; called within ``together``."""
        return find()

    def taken(self, number: int) -> Any:
        """A copy of the anchor, as ``copy`` of a parameter that has taken it."""
        raise NotImplementedError(f"{type(self).__name__} has no peers")

    def still(self, number: int) -> G:
        """What the next update will have of the one that was encoded last."""
        return self.update(number)

    def digests(self, fragment: Fragment[G]) -> list[int]:
        """Of the anchor, which is equal on all peers before an exchange."""
        return [zlib.crc32(np.ascontiguousarray(self.values(self.anchors[n])).data) for n in fragment.numbers]

    def check_parameters(self) -> None:
        """Called before an exchange; raises an error if other parameters are trained than at the beginning."""

    # Schedule

    def step(self, steps: int = 1) -> None:
        """After so many local steps: the exchanges that end and begin then."""
        self.begun = True
        self.clock += steps
        clock = self.clock
        for fragment in self.fragments:
            if fragment.ends is not None and clock >= fragment.ends:
                self.end(fragment)
        if self._times is not None:
            (fragment,) = self.fragments
            with self.together():
                wanted = bool(self._times(self.collectives.rank(), clock))
                wanted = self.anywhere(wanted or (self._bounded and clock >= fragment.due))
            self.exchange(fragment, "step", wanted)
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
        if self.peers is not None:
            with self.together():
                self.peers.exchange(fragment)
            return
        with self.together():
            begun = self._begin(fragment, call, present, self.local.delay if delay is None else delay)
        if begun and fragment.ends == self.clock:
            self.end(fragment)

    def _begin(self, fragment: Fragment[G], call: str, present: bool, delay: int) -> bool:
        """As ``exchange``. Returns whether an exchange is in flight now."""
        self.awaited = "step check"
        self.check_parameters()
        if self.collectives.elastic() and not self.in_state:
            raise RuntimeError(NOT_IN_STATE)
        engine = self.engine
        due = self.clock + self.period(self.clock) if present else fragment.due
        if self._times is None:  # else there may be no exchange
            engine.stats.begin_step()
        updates = {n: self.update(n) for n in fragment.numbers} if present else {}
        broken = self.anywhere(not self.finite(updates.values()))
        heard = self._check_step(fragment, call, due, not broken, present)
        self.awaited = "next"
        if not heard.sending:
            return False
        engine.stats.begin_step()
        fragment.due = due
        steps, fragment.began = self.clock - fragment.began, self.clock
        engine.stats.add(dense=steps * self.dense_bytes(fragment))
        if heard.discarding:
            self._discard(fragment, present)
            engine.stats.end_step()
            return False
        if present:
            self.decay(fragment.numbers, self.local.decay)
        else:
            updates = {n: self.nothing(n) for n in fragment.numbers}
        engine.feedback = present
        self.awaited = "containers"
        try:
            for number in self.held(fragment.numbers):
                fragment.tickets[number] = fragment.reducer.start(self.parameters[number], updates[number], True)
        finally:
            engine.feedback = True
        self.awaited = "next"
        fragment.present = present
        fragment.ends = self.clock + delay
        if delay and self.local.mix is None:
            fragment.starts = {n: self.copy(n) for n in fragment.numbers}
        elif delay:
            fragment.keeps = self.local.mix or 0.0
        return True

    def _check_step(self, fragment: Fragment[G], call: str, due: int, finite: bool, present: bool) -> Outcome:
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
        said: list[Outcome] = []
        try:
            self.check_step(
                engine.vote(self.agreed, not finite, place, present), STEP_CHECK,
                lambda total: said.append(engine.tally(total, self._compare_ranks, STAY_TOGETHER)),
            )  # fmt: skip
        except Exception:
            self.collectives.complete()
            raise
        return said[0]

    def _compare_ranks(self) -> None:
        """The handshake, and the comparison of the places and the anchors.

        Raises:
            MismatchError: they differ; on all ranks.
        """
        collectives = self.collectives
        self.engine.agree([(p.name, p.shape, p.dtype) for p in self.parameters])
        self.engine.compare_places(STAY_TOGETHER)
        sums = [zlib.crc32(np.ascontiguousarray(self.values(anchor)).data) for anchor in self.anchors]
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

    def dense_bytes(self, fragment: Fragment[G]) -> int:
        """What a rank would send in a step that reduces the fragment's gradients dense."""
        size = sum(self._nbytes[number] for number in fragment.numbers)
        return traffic.allreduce(size, self.collectives.size()).sent

    def end(self, fragment: Fragment[G]) -> None:
        """Waits for an exchange, takes the outer step, and lets the local parameters follow."""
        fragment.ends = None
        with self.together():
            self._receive(fragment)
        with self.engine.receiving():  # all ranks do the same
            self.outer_step(fragment)
            fragment.outer_steps += 1
            fragment.updates = {}
            if fragment.present:
                self.follow_anchor(fragment)
        self.engine.stats.end_step()

    def _receive(self, fragment: Fragment[G]) -> None:
        """Waits for the means."""
        if fragment.failure is not None:
            failure, fragment.failure = fragment.failure, None
            raise failure
        tickets, scale, finish = fragment.tickets, 1 / self.collectives.size(), fragment.reducer.finish
        fragment.tickets = {}
        try:
            fragment.updates |= {number: finish(ticket, scale) for number, ticket in tickets.items()}
        except Exception:
            fragment.reducer.complete()
            self.collectives.complete()
            raise

    def settle(self) -> None:
        for fragment in self.fragments:
            if fragment.ends is not None:
                try:
                    self._receive(fragment)
                except Exception as error:  # ``end`` raises it, on all ranks
                    fragment.failure = error
                    raise

    def follow_anchor(self, fragment: Fragment[G]) -> None:
        """Lets the fragment's parameters follow, as ``follow``."""
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
            self.follow_anchor(fragment)
            self.renew(fragment.numbers)
