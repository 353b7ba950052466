"""Exchanges among peers that come and go: through files (``exchange/store.py``), or by the ranks of a quorum that
another library has found.

An exchange has those peers as members whose messages were there in time. All peers, also those that were late or away,
take the same outer steps in the same order, each with the mean of its members' updates, so that anchors are equal bit
for bit. A peer that is not a member keeps its own progress: its parameters move as the anchor does, and its next update
has all of it.

A peer may have several ranks, which hold parts of one model or train it together. With files, rank 0 of them decides:
it sends when all others have, and tells them whose messages count. In a quorum, each of them sees the same. What fails
on one of them fails on all.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Generic

import numpy as np

from hvd_deepreduce import __version__
from hvd_deepreduce.codecs.interfaces import Floats, RngKey
from hvd_deepreduce.config import ConfigError
from hvd_deepreduce.engine.fragments import Fragment
from hvd_deepreduce.engine.tensors import G
from hvd_deepreduce.exchange import traffic
from hvd_deepreduce.exchange.messages import Message, PeerCollectives, largest_group
from hvd_deepreduce.exchange.statements import MismatchError
from hvd_deepreduce.exchange.store import Members, MissingError, SharedStore
from hvd_deepreduce.ops import arrays
from hvd_deepreduce.pipeline import bundle
from hvd_deepreduce.wire.quoting import quoted
from hvd_deepreduce.wire.standalone import ContainerError

if TYPE_CHECKING:
    from hvd_deepreduce.engine.local_exchanges import LocalExchanges

_log = logging.getLogger("hvd_deepreduce")
_SOME = 64
"""Zeros that are encoded to see whether they stay so."""


def _size(parts: Mapping[str, bytes]) -> int:
    return sum(map(len, parts.values()))


def _digest(told: object) -> str:
    return blake2b(repr(told).encode(), digest_size=16).hexdigest()


class Peers(ABC, Generic[G]):
    """The exchanges of one peer.

    Args:
        local: its parameters and anchors.
        store: how it reaches the others.
    """

    def __init__(self, local: LocalExchanges[G], store: PeerCollectives) -> None:
        self.local, self.store = local, store
        self._checked: set[str] = set()

    def check(self) -> None:
        """
        Raises:
            RuntimeError: an outer step has failed here, and may be half applied.
        """
        if self.local.engine.failed:
            raise RuntimeError(
                f"a step of peer {self.store.peer} has failed, and its parameters may have a part of it: load a state "
                "of this peer or of another one, and the model's, before the next step or state"
            )

    def prepare(self) -> None:
        """Begins what an exchange needs, as soon as the last one has ended."""

    @abstractmethod
    def catch_up(self, fragment: Fragment[G]) -> None:
        """Takes the outer steps that the others have taken without this peer."""

    def exchange(self, fragment: Fragment[G]) -> None:
        """Takes what the others have done meanwhile, and exchanges this peer's update."""
        local, engine = self.local, self.local.engine
        self.check()
        local.check_parameters()
        engine.stats.begin_step()
        fragment.due = local.clock + local.period(local.clock)  # before another peer may take this one's state
        self.prepare()
        self.catch_up(fragment)
        updates = {n: local.update(n) for n in fragment.numbers}
        finite = not local.anywhere(not local.finite(updates.values()))
        if not finite:
            _log.warning("peer %d has NaN or infinity in its %s", self.store.peer, local.not_finite % local.clock)
            local.recover(fragment)
        self._exchange(fragment, updates if finite else None)
        engine.stats.end_step()

    @abstractmethod
    def _exchange(self, fragment: Fragment[G], updates: dict[int, G] | None) -> None:
        """
        Args:
            updates: None: this peer has none.
        """

    def _encode(self, fragment: Fragment[G], updates: dict[int, G]) -> tuple[dict[str, bytes], Callable[[], None]]:
        """The parts of a message with these updates, and what to call if they do not count."""
        local, engine, decay = self.local, self.local.engine, self.local.local.decay
        copies: dict[int, dict[str, Floats]] = {}
        for number in fragment.numbers if engine.has_velocity else ():
            with local.in_order(number):
                copies[number] = engine.copies([local.parameters[number]])
        local.decay(fragment.numbers, decay)
        self._start(fragment, updates)
        parts = self.store.taken()

        def take_back() -> None:
            self._take_back(fragment, parts)
            local.decay(fragment.numbers, 1 / decay if decay else 1.0)
            for number, before in copies.items():
                with local.in_order(number):
                    engine.return_to([local.parameters[number]], before)

        try:
            self._check_nothing(fragment)
        except ConfigError:
            take_back()
            raise
        return parts, take_back

    def _check_nothing(self, fragment: Fragment[G]) -> None:
        """
        Raises:
            ConfigError: an update of zeros, which takes the place of an absent peer's, is decoded to something else.
        """
        for bucket in fragment.reducer.buckets:
            if bucket.dense or bucket.name in self._checked:
                continue
            for pipeline, *_ in bucket.slices:
                zeros, decoded = np.zeros(_SOME, bucket.dtype), np.ones(_SOME, bucket.dtype)
                key = RngKey(0, 0xFFFFFFFF, 0)  # of no parameter
                packed = pipeline.encode(zeros, None, key, 2)
                pipeline.decode(pipeline.unpack(packed, 1, _SOME, bucket.dtype, key), decoded)
                if decoded.any():
                    raise ConfigError(
                        "this config sends zeros as other values, so that a peer that is away would count: let the "
                        "sparsifier leave elements out (topk, for instance), or choose another value codec"
                    )
            self._checked.add(bucket.name)

    def _counted(self, fragment: Fragment[G], messages: Mapping[int, Message], names: Iterable[str]) -> None:
        """The outer step of an exchange in which this peer's update counts."""
        local = self.local
        self._take(fragment, messages, names, self._nothing(fragment))
        with local.engine.receiving():
            local.follow_anchor(fragment)
        steps, fragment.began = local.clock - fragment.began, local.clock
        local.engine.stats.add(dense=steps * local.dense_bytes(fragment))

    def _said(self, fragment: Fragment[G]) -> dict[str, str]:
        local = self.local
        told = {
            "config": local.engine.config.shared(), "outer optimizer": local.about_outer(),
            "parameters at the last exchange": self._digests(fragment), "number of ranks": local.ranks_of_peer,
            "exchange": (local.fragments.index(fragment), fragment.outer_steps),
        }  # fmt: skip
        said = {name: _digest(one) for name, one in told.items()}
        return {"release": __version__, "number of peers": str(self.store.peers), "model": self._model, **said}

    def _digests(self, fragment: Fragment[G]) -> list[Any]:
        return self.local.digests(fragment)

    @cached_property
    def _model(self) -> str:
        local = self.local
        return _digest(([(p.name, p.shape, p.dtype) for p in local.parameters], len(local.fragments)))

    def _start(self, fragment: Fragment[G], updates: dict[int, G]) -> None:
        """Encodes updates. The containers of all peers in an exchange have its number as their step."""
        local = self.local
        for number in fragment.numbers:
            local.parameters[number].step = fragment.outer_steps
        for number in local.held(fragment.numbers):
            fragment.tickets[number] = fragment.reducer.start(local.parameters[number], updates[number], True)

    def _take(
        self,
        fragment: Fragment[G],
        messages: Mapping[int, Message],
        names: Iterable[str],
        nothing: Callable[[str], bytes],
    ) -> None:
        """The outer step of an exchange, of which the tickets have been started. The last arguments are those of
        ``PeerCollectives.show``.

        Raises:
            ContainerError: a message lacks a part, or has one of another length, or that cannot be decoded.
        """
        for bucket in fragment.reducer.buckets if fragment.tickets else ():
            size = sum(bucket.sizes) * bucket.dtype.itemsize
            for peer, one in messages.items() if bucket.dense else ():
                found = len(one.parts.get(bucket.name, b""))
                if found != size:
                    raise ContainerError(
                        f"the message of peer {peer} has {found} bytes of {bucket.name}, which has {size} bytes"
                    )
        received = sum(_size(one.parts) for peer, one in messages.items() if peer != self.store.peer)
        self.local.engine.stats.add(wire=traffic.Traffic(0, received))
        self.store.show({peer: one.parts for peer, one in messages.items()}, nothing, names)
        fragment.updates = self._finish(fragment, 1 / len(messages))
        with self.local.engine.receiving():
            self.local.outer_step(fragment)
        fragment.updates = {}
        fragment.outer_steps += 1

    def _finish(self, fragment: Fragment[G], scale: float) -> dict[int, G]:
        tickets, fragment.tickets = fragment.tickets, {}
        return {number: fragment.reducer.finish(ticket, scale) for number, ticket in tickets.items()}

    def _replay(self, fragment: Fragment[G], messages: Mapping[int, Message]) -> None:
        """Takes an outer step without an update of this process.

        If a message of this peer counts, an earlier process has sent it, and it may have all that a state from before
        has: that is dropped, so that nothing is sent twice.
        """
        local = self.local
        before = {number: local.taken(number) for number in fragment.numbers}
        local.engine.feedback = False
        try:
            self._start(fragment, {number: local.nothing(number) for number in fragment.numbers})
        finally:
            local.engine.feedback = True
        empty = self.store.taken()
        self._take(fragment, messages, empty, empty.__getitem__)
        with local.engine.receiving():
            if self.store.peer in messages:
                local.decay(fragment.numbers, 0.0)
                local.follow_anchor(fragment)
                return
            for number, start in before.items():
                local.follow(number, start, 0.0)

    def _take_back(self, fragment: Fragment[G], own: dict[str, bytes]) -> None:
        """This peer's update, which has been encoded, does not count: its residual has again what the next update will
        not have."""
        local, store = self.local, self.store
        store.show({store.peer: own}, self._nothing(fragment), own)
        for number, decoded in self._finish(fragment, 1.0).items():
            with local.in_order(number):
                sent, update = map(local.tensors_of.flat, (decoded, local.still(number)))
                local.engine.give_back(local.parameters[number], sent, update)

    def adopted(self, state: Any) -> tuple[Any, bool]:
        """A state that this peer can load, and whether it was another peer's: then its own residual stays."""
        kept = state.get("compression") if isinstance(state, Mapping) else None
        if not isinstance(kept, Mapping):
            return state, False
        own: dict[str, Any] = {"rank": self.store.peer, "size": self.store.peers}
        if kept.get("rank") == own["rank"]:
            return {**state, "compression": {**kept, **own}}, False
        here = self.local.engine.state_dict()
        own |= {key: here[key] for key in ("memory", "residuals")}
        return {**state, "compression": {**kept, **own}}, True

    def _nothing(self, fragment: Fragment[G]) -> Callable[[str], bytes]:
        """Gives the part of a bucket that a peer would send without an update."""
        buckets = {bucket.name: bucket for bucket in fragment.reducer.buckets}

        def part(name: str) -> bytes:
            bucket = buckets[name]
            zeros: Floats = arrays.zeros(sum(bucket.sizes), bucket.dtype, bucket.gradient)
            if bucket.dense:
                return arrays.to_host(zeros).tobytes()
            packed = bundle.encode(zeros, None, None, bucket.slices, self.store.peers, True)
            return arrays.to_host(packed).tobytes()

        return part


class StorePeers(Peers[G]):
    """Through ``exchange/store.py``."""

    store: SharedStore

    def place(self, fragment: Fragment[G], number: int) -> str:
        """The folder of an exchange of a fragment."""
        return f"{self.sequence(fragment)}/{number:08}"

    def sequence(self, fragment: Fragment[G]) -> str:
        """The folder of all exchanges of a fragment."""
        return str(self.local.fragments.index(fragment))

    def _digests(self, fragment: Fragment[G]) -> list[Any]:
        """Of all ranks that hold a part, so that rank 0's message tells whether any of them has another one. In a
        quorum, a rank may have to take the others' state where the others of its peer need not."""
        own = super()._digests(fragment)
        return self.local.of_all(own) if self.local.ranks_of_peer > 1 else own

    def _check_alike(self, fragment: Fragment[G]) -> None:
        """
        Raises:
            MismatchError: the ranks of this peer are not at the same exchange; on all of them.
        """
        local = self.local
        every = local.of_all([local.clock, fragment.outer_steps, fragment.due])
        if any(one != every[0] for one in every):
            raise MismatchError(
                f"the ranks of peer {self.store.peer} are not at the same exchange: their local steps, exchanges, and "
                f"the step of the next one are {', '.join(map(str, every))}. Load the states of one checkpoint on all "
                "of its ranks. Nothing was exchanged"
            )

    def catch_up(self, fragment: Fragment[G]) -> None:
        """
        Raises:
            MismatchError: the ranks of this peer are not at the same exchange; or their files have been deleted.
        """
        self._check_alike(fragment)
        place, before, own = self.place, fragment.outer_steps, 0
        first = self.store.last(self.sequence(fragment)) is None
        while members := self._told(lambda: self.store.decided(place(fragment, fragment.outer_steps))):
            own += self.store.peer in members
            try:
                self._follow(fragment, members)
            except MissingError as error:
                done = [int(name) for name in self.store.store.names(self.sequence(fragment)) if name.isdecimal()]
                raise MismatchError(
                    f"the other peers are {max(done, default=0) - fragment.outer_steps} exchanges ahead of peer "
                    f"{self.store.peer}, and have deleted the files ({error}): load a newer state, of this peer or of "
                    "another one. To go back to an older state with all peers, give them all a new place"
                ) from error
        if (count := fragment.outer_steps - before) and self.local.leads:
            _log.log(
                logging.WARNING if first else logging.INFO,
                "peer %d has taken %d exchanges that were recorded, from number %d on. In %d of them an update counts "
                "that an earlier process of it has sent: what its state had not sent then was dropped, since it may be "
                "in it. To go back to an older state with all peers, give them all a new place",
                self.store.peer, count, before, own,
            )  # fmt: skip

    def _exchange(self, fragment: Fragment[G], updates: dict[int, G] | None) -> None:
        if updates is None:
            return
        store, said = self.store, self._said(fragment)
        parts, take_back = self._encode(fragment, updates)
        place, sequence = self.place(fragment, fragment.outer_steps), self.sequence(fragment)
        counts = False
        try:
            sent = self._send(place, Message(said, parts, store.run))
            members = self._told(lambda: store.agree(place, sequence, sent))
            assert members
            counts = sent and members.get(store.peer) == store.run
            messages = self._messages(fragment, members, said)
        except BaseException as error:
            if counts:  # the others have taken the update, and the step is not taken here
                self.local.engine.note_failure(error)
            raise
        finally:  # also if the process is told to end while it waits: its state has no update twice
            if not counts:
                take_back()
        if counts:
            self._counted(fragment, messages, parts)
            self._note(fragment, members)
        else:
            self._follow(fragment, members)

    def _follow(self, fragment: Fragment[G], members: Members) -> None:
        self._replay(fragment, self._messages(fragment, members, self._said(fragment)))
        self._note(fragment, members)

    def _note(self, fragment: Fragment[G], members: Members) -> None:
        """After an exchange."""
        store, now = self.store, set(members)
        last = store.last(self.sequence(fragment))
        before = set(range(store.peers)) if last is None else last
        if self.local.leads and now != before:
            if now == {store.peer} and not fragment.outer_steps > 1:
                _log.warning(
                    "peer %d is alone in its first exchange, and there may be %d peers: if the others have begun, give "
                    "all of them the same place", store.peer, store.peers,
                )  # fmt: skip
            gone, come = sorted(before - now), sorted(now - before)
            _log.info("peers %s are not in exchange %d; peers %s are again", gone, fragment.outer_steps - 1, come)
        store.note(self.sequence(fragment), members)
        if fragment.outer_steps > store.keep and self.local.sends:
            with suppress(OSError):
                store.forget(self.place(fragment, fragment.outer_steps - store.keep - 1))

    def _told(self, members: Callable[[], Members | None]) -> Members | None:
        """What rank 0 of this peer has found, on all of its ranks."""
        found = self.local.told(members)
        return None if found is None else {int(peer): run for peer, run in found.items()}

    def _send(self, place: str, message: Message) -> bool:
        """As ``SharedStore.send``, on all ranks of this peer; rank 0 sends last."""
        local, sent = self.local, True
        if local.sends and not local.leads:
            sent = self.store.send(place, message)
        sent = not local.anywhere(not sent)
        if local.sends:
            local.engine.stats.add(wire=traffic.Traffic(_size(message.parts), 0))
        return bool(local.told(lambda: sent and self.store.send(place, message)))

    def _messages(self, fragment: Fragment[G], members: Members, said: Mapping[str, str]) -> dict[int, Message]:
        """Those of the fragment's exchange, of this rank's part.

        Raises:
            MismatchError: they are of peers that say otherwise.
        """
        messages = self.store.messages(self.place(fragment, fragment.outer_steps), members)
        for peer, message in messages.items():
            if apart := message.apart(said):
                raise MismatchError(
                    f"this peer, {self.store.peer}, has another {' and '.join(apart)} than peer {peer}: begin with the "
                    "same settings and parameters, or load a state of this job. If an earlier job has used this place, "
                    "give all peers a new one"
                )
        return messages


class Quorum(PeerCollectives, ABC):
    """Ranks that another library has found to be there: what one of them sends, all of them receive, or an error."""

    @abstractmethod
    def begin(self) -> None:
        """Looks for the ranks of the next exchange, unless it has."""

    @abstractmethod
    def takes_part(self) -> bool:
        """Whether this peer's update can count: not where it has yet to take the others' state, or after an error."""

    @abstractmethod
    def messages(self, message: Message) -> dict[int, Message | str]:
        """Of all ranks, what each gives here, by peer, or what is wrong with it; empty after an error."""

    @abstractmethod
    def commit(self, failure: Exception | None) -> bool:
        """Whether the exchange counts, here; on other peers it may count nevertheless. A state that this peer has to
        take is loaded in this call.

        Args:
            failure: why it cannot count.
        """

    @abstractmethod
    def end(self) -> None:
        """After an exchange, or an error in it: the next one begins anew."""


class QuorumPeers(Peers[G]):
    """Through a ``Quorum``."""

    store: Quorum

    def __init__(self, local: LocalExchanges[G], store: Quorum) -> None:
        super().__init__(local, store)
        self._sent: int | None = None
        """The exchange for which this peer has encoded an update that may have reached others, until one counts here.
        There is one fragment (``check_store``)."""

    def prepare(self) -> None:
        self.store.begin()

    def catch_up(self, fragment: Fragment[G]) -> None:
        """A peer that was away takes the others' state in ``Quorum.commit``."""

    def adopted(self, state: Any) -> tuple[Any, bool]:
        """As of ``Peers``. If the others have counted what this peer has taken back, its residual goes."""
        state, others = super().adopted(state)
        done = state.get("outer_steps") if others else None
        if isinstance(done, list) and self._sent is not None and any(number > self._sent for number in done):
            state = {**state, "compression": {**state["compression"], "residuals": {}}}
        return state, others

    def _exchange(self, fragment: Fragment[G], updates: dict[int, G] | None) -> None:
        try:
            self._exchange_in_quorum(fragment, updates)
        finally:
            self.store.end()

    def _exchange_in_quorum(self, fragment: Fragment[G], updates: dict[int, G] | None) -> None:
        quorum = self.store
        parts: dict[str, bytes] = {}
        said: dict[str, str] = {}
        take_back: Callable[[], None] | None = None
        if updates is not None and quorum.takes_part():
            said = self._said(fragment)
            parts, take_back = self._encode(fragment, updates)
            self._sent = fragment.outer_steps
        try:
            self.local.engine.stats.add(wire=traffic.Traffic(_size(parts), 0))
            every = quorum.messages(Message(said, parts))
            absent = [peer for peer, one in every.items() if isinstance(one, Message) and not one.said]
            messages, refused = largest_group({peer: one for peer, one in every.items() if peer not in absent})
            failure = None
            if quorum.peer in refused:
                reason = quoted(refused[quorum.peer])
                failure = MismatchError(f"the other peers go on without peer {quorum.peer}: {reason}")
            counts = quorum.peer in messages and take_back is not None
            if take_back is not None and not counts:  # before this peer takes the others' state
                take_back()
                take_back = None
            commits = quorum.commit(failure) and bool(messages)
            if failure is not None:
                raise failure
            if counts and commits:
                take_back = None
        finally:
            if take_back is not None:
                take_back()
        if not commits:
            _log.warning("peer %d has left the exchange after step %d out", quorum.peer, self.local.clock)
            return
        self._sent = None
        if counts:
            self._counted(fragment, messages, parts)
        else:
            self._replay(fragment, messages)
