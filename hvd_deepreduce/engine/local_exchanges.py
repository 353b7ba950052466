"""Local updates without a framework: the schedule of the exchanges, and what is done in one.

The state of a rank (``local_state.py``): its own parameters, and the anchor, which is the same on all ranks, bit for
bit. An adapter reads and writes the parameters: it implements the abstract methods of ``LocalExchanges``.
"""

from __future__ import annotations

import logging
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np

from hvd_deepreduce.codecs.interfaces import Floats
from hvd_deepreduce.engine.fragments import Fragment, Proposal
from hvd_deepreduce.engine.local_state import LocalState
from hvd_deepreduce.engine.peers import Peers
from hvd_deepreduce.engine.step_check import Outcome, Place
from hvd_deepreduce.engine.tensors import G
from hvd_deepreduce.exchange import traffic
from hvd_deepreduce.exchange.statements import MismatchError
from hvd_deepreduce.wire.standalone import ContainerError

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
    "let a function for every return the same, freeze the same parameters, and load the states of one checkpoint"
)
FAILED = (
    "an exchange of updates has failed, and a part of what it took from the residuals is lost: to go on after its "
    "error, load an earlier state into the model and LocalSGD on all ranks"
)


class LocalExchanges(LocalState[G]):
    """The exchanges of one rank: ``step`` and ``sync`` begin and end them.

    The arguments are those of ``LocalState``.

    With a delay, where an adapter can (``goes_ahead``), an exchange is divided into phases. A rank waits only for what
    all ranks have started at least a step before; with a longer delay they may be further apart::

        clock c                    the updates are kept, and this rank's vote of the step check is started
        clock c + delay // 3       the votes are there: the updates are encoded, and their sizes are told to all ranks
        clock c + 2 * delay // 3   the sizes are there: the updates are sent
        clock c + delay            the means are there: outer step, and the parameters follow

    There is at most one phase at a step, but for the last one, at which all that are left come. Collectives may be
    matched by their order, so all ranks let their exchanges go on in one order: at each step those that end, then the
    others in the order of their ends, and then those that begin.

    Attributes:
        awaited: what the other ranks wait for first: this rank's ``step check`` or ``containers``, or its ``next`` step
            check; ``nothing``: they are told otherwise.
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

    def goes_ahead(self) -> bool:
        """Whether the votes of an exchange that begins now need not be waited for: ``start_vote`` can be used."""
        return False

    def start_vote(self, vote: Floats, name: str) -> Any:
        """Starts to add up all ranks' votes, for ``wait_votes`` of the collectives."""
        return self.collectives.start_vote(vote, name)

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
    def take_back(self, number: int, start: Any, unsent: G) -> Any:
        """Adds to this rank's parameter, and to what ``copy`` of it returned. Returns the latter sum, in its form."""

    def unsent(self, number: int, grown: Floats) -> G:
        """How far a residual has grown, in the form of ``update``."""
        return grown  # type: ignore[return-value]

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

    def leave(self, error: Exception) -> None:  # noqa: B027  (only where a rank can tell)
        """This rank is about to raise an error within ``together``."""

    def stay(self) -> None:  # noqa: B027  (only where several ranks hold parts of a replica)
        """An error within ``together`` will be raised later: this rank goes on."""

    # For ``peers``

    leads = sends = True
    """Whether this rank is the first one of its peer; and whether it sends messages."""
    ranks_of_peer = 1
    """Of a peer whose ranks hold different parts of the model, how many."""

    def told(self, find: Callable[[], T]) -> T:
        """What the first rank of this peer finds, in JSON's types, on all of its ranks; called within ``together``."""
        return find()

    def of_all(self, value: T) -> list[T]:
        """What each rank of this peer has, in JSON's types; called within ``together``."""
        return [value]

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

    def frozen(self) -> list[int]:
        """Numbers of the parameters that are not trained now, in ascending order."""
        return []

    # Schedule

    def step(self, steps: int = 1) -> None:
        """After so many local steps: the exchanges that end and begin then."""
        self.begun = True
        frozen = self.frozen()
        if frozen != list(self._frozen):
            self._frozen = {number: self._frozen.get(number, self.clock) for number in frozen}
        self.clock += steps
        clock = self.clock
        for fragment in self._in_flight():
            phase = 1 if fragment.proposal is not None else 2
            if clock >= fragment.ends:
                self.end(fragment)
            elif clock >= fragment.ends - self.local.delay + phase * self.local.delay // 3:
                self._advance(fragment)
            if fragment.unsent and clock >= fragment.began + max(1, self.local.delay // 3):
                self._take_back(fragment)
        if self._times is not None:
            (fragment,) = self.fragments
            with self.together():
                wanted = bool(self._times(self.collectives.rank(), clock))
                wanted = self.anywhere(wanted or (self._bounded and clock >= fragment.due))
            self.exchange(fragment, "step", wanted)
            return
        for fragment in self.fragments:
            if fragment.ends is None and clock >= fragment.due:
                self.exchange(fragment, "step")
        self._raise_if_idle()

    def _in_flight(self) -> list[Any]:
        """Fragments whose exchanges are, in the order in which all ranks let them go on."""
        return sorted((one for one in self.fragments if one.ends is not None), key=attrgetter("ends"))

    def sync(self, anyway: bool = False) -> None:
        """Ends all exchanges in flight, and exchanges what has been done since then.

        Args:
            anyway: all fragments, though there may have been no step since their last exchange.
        """
        for fragment in self._in_flight():
            self.end(fragment)
        apart = anyway or self._times is not None or self.local.mix is not None
        left = [one for one in self.fragments if apart or self.clock > one.began]
        for fragment in left:
            self.exchange(fragment, "sync", delay=0)
        if self.peers is None:
            if not left:  # other ranks may have more steps, and would wait
                self.exchange(self.fragments[0], "sync", present=False, delay=0)
            self._spread()
        self._raise_if_idle()

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
        delay = self.local.delay if delay is None else delay
        if delay and self.goes_ahead():
            self._propose(fragment, call, delay)
            return
        try:
            with self.together():
                begun = self._begin(fragment, call, present, delay)
        except Exception as error:
            self.awaited = "next"
            self._raise_own(error)
            raise
        if begun and fragment.ends == self.clock:
            self.end(fragment)

    def _begin(self, fragment: Fragment[G], call: str, present: bool, delay: int) -> bool:
        """As ``exchange``; waits for the votes. Returns whether an exchange is in flight now."""
        self.awaited = "step check"
        proposal = self._proposal(fragment, call, present, delay)
        said: list[Outcome] = []
        try:
            self.check_step(
                self._vote(proposal), STEP_CHECK, lambda total: said.append(self._tally(total, proposal.place))
            )
        except Exception:
            self.collectives.complete()
            raise
        self.awaited = "next"
        if not self._decide(fragment, proposal, said[0]):
            return False
        self.awaited = "containers"
        self._encode(fragment, proposal)
        self.awaited = "next"
        return True

    def _proposal(self, fragment: Fragment[G], call: str, present: bool, delay: int) -> Proposal[G]:
        """What this rank has for an exchange that begins now; the arguments are those of ``exchange``."""
        self.check_parameters()
        if self.collectives.elastic() and not self.in_state:
            raise RuntimeError(NOT_IN_STATE)
        due = self.clock + self.period(self.clock) if present else fragment.due
        if self._times is None and present:  # else there may be no exchange
            self.engine.stats.begin_step()
        resting = self._resting(fragment)
        updates = {n: self.nothing(n) if n in resting else self.update(n) for n in fragment.numbers} if present else {}
        finite = not self.anywhere(not self.finite(updates.values()))
        starts = {n: self.copy(n) for n in fragment.numbers} if delay and self.local.mix is None else {}
        numbers = [place for place, one in enumerate(self.fragments) if one is fragment]
        place: dict[str, int | str] = {
            "clock": self.clock, "call": call, "fragment": numbers[0], "outer_steps": fragment.outer_steps
        }  # fmt: skip
        if self._times is None:
            # Already at the exchange where the periods part: no other one is in flight that could wait for its end.
            place["next_exchange"] = " ".join(str(due if one is fragment else one.due) for one in self.fragments)
        if resting and (present or self._times is not None):
            place["frozen"] = ", ".join(self.parameters[number].name for number in sorted(resting))
        return Proposal(self.clock, self.clock + delay, due, place, present, finite, updates, starts, resting)

    def _resting(self, fragment: Fragment[G]) -> set[int]:
        """The fragment's parameters that were frozen, on all ranks, before its last exchange: all ranks have taken what
        any of them had done. They keep their values and their residuals. With ``times``, a rank does not know what the
        others have still to send."""
        if self._times is not None:
            return set()
        return {n for n in fragment.numbers if self._frozen.get(n, self.clock) <= fragment.began}

    def _vote(self, proposal: Proposal[G]) -> Floats:
        return self.engine.vote(self.agreed, not proposal.finite, proposal.place, proposal.present)

    def _tally(self, total: Floats, place: Place) -> Outcome:
        """Compares the ranks, by the sum of their votes, of which this rank's had this place."""
        return self.engine.tally(total, partial(self._compare_ranks, place), STAY_TOGETHER, place)

    def _decide(self, fragment: Fragment[G], proposal: Proposal[G], heard: Outcome) -> bool:
        """Does what the ranks have agreed upon. Returns whether they exchange their updates."""
        if not heard.sending:
            return False
        stats = self.engine.stats
        if self._times is not None:  # else it was counted when it was proposed
            stats.begin_step()
        fragment.due = proposal.due
        steps, fragment.began = proposal.clock - fragment.began, proposal.clock
        stats.add(dense=steps * self.dense_bytes(fragment))
        if heard.discarding:
            self._discard(fragment, proposal.present)
            stats.end_step()
        return not heard.discarding

    def _held_names(self, fragment: Fragment[G]) -> set[str]:
        """Of the parameters whose updates this rank sends."""
        return {self.parameters[number].name for number in self.held(fragment.numbers)}

    def _encode(self, fragment: Fragment[G], proposal: Proposal[G]) -> None:
        """Encodes the updates of a proposal, and starts to send them."""
        engine, updates, numbers = self.engine, proposal.updates, fragment.numbers
        if not engine.in_flight.isdisjoint(self._held_names(fragment)):
            raise RuntimeError(FAILED)
        resting = proposal.resting
        if proposal.present:
            self.decay([n for n in numbers if n not in resting], self.local.decay)
        else:
            updates = {n: self.nothing(n) for n in numbers}
        # With a velocity, a residual is not what was not sent. Other exchanges change it later, or it is of a node.
        own_residuals = not (engine.has_velocity or engine.exchange.own_thread or engine.exchange.several)
        wanted = self.held(numbers) if own_residuals and proposal.present and proposal.starts else ()
        before = {n: self._copy_of_residual(n) for n in wanted if n not in resting}
        engine.feedback = proposal.present
        try:
            for number in self.held(numbers):
                parameter, rests = self.parameters[number], number in resting
                fragment.tickets[number] = fragment.reducer.start(parameter, updates[number], True, rests)
        except (KeyboardInterrupt, SystemExit):  # ``state_dict`` cannot wait for it
            fragment.forget()
            raise
        finally:
            engine.feedback = True
        fragment.present, fragment.ends, fragment.resting = proposal.present, proposal.ends, resting
        fragment.starts, fragment.unsent = proposal.starts, self._not_sent(before)
        fragment.keeps = (self.local.mix or 0.0) if proposal.ends > proposal.clock else 0.0

    # What was not sent, with a delay. Without one, it leaves the parameters when they take the anchor, and waits in the
    # residual. With one, the local steps until the end would go on from a place to which no rank will return.

    def _copy_of_residual(self, number: int) -> dict[str, Floats]:
        with self.in_order(number):
            return self.engine.copies([self.parameters[number]])

    def _not_sent(self, before: Mapping[int, Mapping[str, Floats]]) -> dict[int, G]:
        """What was not sent of the updates, by number, where this rank has residuals, of which these are the copies
        before."""
        unsent: dict[int, G] = {}
        for number, copies in before.items():
            with self.in_order(number):
                grown = self.engine.grown(self.parameters[number], copies)
                if grown is not None:
                    unsent[number] = self.unsent(number, grown)
        return unsent

    def _take_back(self, fragment: Fragment[G]) -> None:
        """What was not sent leaves the parameters, a step after the exchange began, or when its updates are encoded. It
        stays in the residuals."""
        unsent, fragment.unsent = fragment.unsent, {}
        for number, one in unsent.items():
            fragment.starts[number] = self.take_back(number, fragment.starts[number], one)

    # Phases of an exchange with a delay

    def _propose(self, fragment: Fragment[G], call: str, delay: int) -> None:
        """The first phase: an exchange begins. After an error of this rank its vote says so."""
        fragment.ends = self.clock + delay
        proposal: Proposal[G] = Proposal(self.clock, fragment.ends)
        with self._alone(fragment):
            proposal = self._proposal(fragment, call, True, delay)
        # The first name that is free, on all ranks: the votes of ranks that part meet each other, too.
        taken = {one.proposal.name for one in self.fragments if one.proposal is not None}
        names = (f"{STEP_CHECK}.{place}" if place else STEP_CHECK for place in range(len(self.fragments)))
        proposal.name = next(name for name in names if name not in taken)
        proposal.vote = self.start_vote(self._vote(proposal), proposal.name)
        fragment.proposal = proposal

    def _advance(self, fragment: Fragment[G]) -> bool:
        """The next phase before the end. Returns whether there was one."""
        proposal, held = fragment.proposal, fragment.held
        fragment.proposal = fragment.held = None
        if proposal is not None:
            self._begin_late(fragment, proposal)
        elif held is not None:
            with self._all_alike():
                held.launch()
        return proposal is not None or held is not None

    def _begin_late(self, fragment: Fragment[G], proposal: Proposal[G]) -> None:
        """The second phase: as the rest of ``_begin``, once the votes have come."""
        with self._all_alike():
            heard = self._tally(self.collectives.wait_votes(proposal.vote), proposal.place)
        if heard.discarding:
            fragment.ends = None
        held = self.collectives.hold(fragment.reducer.count())
        with self._alone(fragment, self.collectives.ordered):
            if self._decide(fragment, proposal, heard):
                with held:
                    self._encode(fragment, proposal)
        if not heard.discarding:
            held.tell(self._error)
            fragment.held = held

    _error: Exception | None = None
    """What this rank raises when all ranks have heard of it."""

    @contextmanager
    def _all_alike(self) -> Iterator[None]:
        """Around what fails on all ranks at the same place of their schedules, if it fails: nothing is in flight then.
        If the others have heard of an error of this rank, it raises that one."""
        self.awaited = "nothing"
        try:
            with self.together():
                yield
        except Exception as error:
            self.collectives.complete()
            for fragment in self.fragments:
                fragment.forget()
            self._raise_own(error)
            raise
        finally:
            self.awaited = "next"

    def _raise_own(self, heard: Exception | None = None) -> None:
        """Raises the error of this rank that the others have heard of."""
        own, self._error = self._error, None
        if own is not None:
            raise own from heard

    def _raise_if_idle(self) -> None:
        """Nothing is in flight that the others wait for: they can hear of this rank's error in its next vote."""
        if self._error is not None and not self._in_flight():
            self.leave(self._error)
            self._raise_own()

    @contextmanager
    def _alone(self, fragment: Fragment[G], tells: bool = True) -> Iterator[None]:
        """Around what may fail on this rank alone: it goes on in its schedule, and raises the error when all ranks hear
        of it, or after the step if nothing is in flight. An exchange of this step that it left out would be the next
        one that it begins, and the others would have begun another.

        Args:
            tells: whether the others hear of it. If not, they would wait for what this rank does not send.
        """
        self.awaited = "nothing"
        try:
            with self.together():
                yield
        except Exception as error:
            if tells:
                self.engine.note_failure(error)
                if self.anywhere(self.engine.failed):
                    self._error = self._error or error
                    self.stay()
                    return
            for one in self.fragments if isinstance(error, ContainerError) else [fragment]:  # the former: on all ranks
                one.forget()
            self.awaited = "next"
            self.leave(error)
            raise
        finally:
            self.awaited = "next"

    def _compare_ranks(self, here: Place) -> None:
        """The handshake, and the comparison of the places and the anchors.

        Args:
            here: this rank's place.

        Raises:
            MismatchError: they differ; on all ranks.
        """
        collectives = self.collectives
        self.engine.agree([(p.name, p.shape, p.dtype) for p in self.parameters])
        self.engine.compare_places(STAY_TOGETHER, here)
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
        while self._advance(fragment):
            pass
        if fragment.ends is None:  # its updates were discarded
            return
        fragment.ends = None
        if self.local.delay and self.goes_ahead():
            with self._alone(fragment):
                self._receive(fragment)
                self._apply(fragment)
        else:
            with self.together():
                self._receive(fragment)
            self._apply(fragment)
        self.engine.stats.end_step()

    def _apply(self, fragment: Fragment[G]) -> None:
        for number in fragment.resting:  # what a codec makes of zeros is not theirs
            fragment.updates.pop(number, None)
        names = self._held_names(fragment)
        self.engine.in_flight |= names  # an error leaves a part of the step in the parameters
        with self.engine.receiving():  # all ranks do the same
            if fragment.updates or not fragment.resting:
                self.outer_step(fragment)
            fragment.outer_steps += 1
            fragment.updates = {}
            if fragment.present:
                self.follow_anchor(fragment)
        self.engine.in_flight -= names

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
        if self.peers is not None:
            self.peers.check()
        for fragment in self._in_flight():
            while self._advance(fragment):
                pass
            if fragment.ends is not None:
                try:
                    self._receive(fragment)
                except Exception as error:  # ``end`` raises it, on all ranks
                    fragment.failure = error
                    raise
        if self._error is not None:
            raise self._error
        if self.peers is None and self.engine.in_flight:
            raise RuntimeError(FAILED)

    def follow_anchor(self, fragment: Fragment[G]) -> None:
        """Lets the fragment's parameters follow, as ``follow``."""
        starts, keeps, resting = fragment.starts, fragment.keeps, fragment.resting
        fragment.starts, fragment.unsent, fragment.keeps, fragment.resting = {}, {}, 0.0, set()
        if self.clock == fragment.began:  # nothing was done since: no rounding error either
            starts = {}
        for number in fragment.numbers:
            if number not in resting:
                self.follow(number, starts.get(number), keeps)
            elif not keeps:  # it is the anchor already, unless it has moved by itself, or is trained again
                self.follow(number, None if number in self._frozen else starts.get(number), 0.0)

    def _discard(self, fragment: Fragment[G], present: bool) -> None:
        """A rank has an update that is not finite: all go back to the anchor."""
        _log.warning(
            "a rank has NaN or infinity in its parameters after local step %d: all ranks continue from their last "
            "exchange", fragment.began,
        )  # fmt: skip
        if present:
            self.recover(fragment)

    def recover(self, fragment: Fragment[G]) -> None:
        """After NaN or infinity: a fragment's parameters become the anchor. So do those of this rank's other fragments
        that are not finite: NaN would spread from them in the next step, and so it would go on for ever."""
        self.follow_anchor(fragment)
        self.renew(fragment.numbers)
        for other in self.fragments:
            numbers = other.numbers
            if other is fragment or not self.anywhere(not self.finite(map(self.update, numbers))):
                continue
            starts = other.starts if other.proposal is None else other.proposal.starts
            other.unsent = {}
            for number in numbers:
                self.follow(number, None, 0.0)
                if number in starts:  # an exchange in flight ends with the progress that is made from now on
                    starts[number] = self.copy(number)
            self.renew(numbers)
