"""Exchanges through a shared folder or an object store, for sites without a direct link: peers come and go.

Each exchange has a folder of its own::

    NAME/0, NAME/2             what peers 0 and 2 have sent: a message
    NAME/part3/0.RUN           of a peer with several ranks, what its rank 3 has sent in the process named RUN
    NAME/commit                whose messages count, of which runs: the same for all, whoever reads it later

A file appears whole or not at all, and never changes. The first peer that finds all messages that it waits for, or has
waited long enough, writes the commit; of several, the first one stays. A peer that is late, or was away, reads the
commits and messages that it has missed. ``messages.py`` has the format of a message.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Mapping
from pathlib import Path

from hvd_deepreduce.exchange.messages import MAX_TEXT, RUN, Message, PeerCollectives, largest_group
from hvd_deepreduce.exchange.statements import MismatchError
from hvd_deepreduce.wire.quoting import quoted
from hvd_deepreduce.wire.standalone import ContainerError

_log = logging.getLogger("hvd_deepreduce")
_POLL = 0.02, 1.0
"""Seconds from one look to the next: at first, and at most. Between them an eighth of the time so far, so that nobody
waits much longer than for the others."""
AGAIN = 0.1, 1.0, 5.0
"""Seconds until a message that counts is read again, if the store gives an error."""
_GRACE = 0.2
"""Seconds, at least, for which an exchange waits for a peer that was in the last one."""


class Store(ABC):
    """Files by name. ``hvd_deepreduce`` has ``Folder`` and ``ObjectStore``."""

    @abstractmethod
    def put_new(self, name: str, data: bytes) -> bool:
        """Writes a file whole, and durably, unless there is one of this name. Returns whether it did."""

    @abstractmethod
    def get(self, name: str) -> bytes | None:
        """A file's content; None: there is none."""

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """Names of the files and folders in a folder; none if it does not exist."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Deletes a file, if it exists."""


class Folder(Store):
    """A folder that all peers see, on a file system with hard links."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser()
        self.path.mkdir(parents=True, exist_ok=True)

    def put_new(self, name: str, data: bytes) -> bool:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".") as file:
            os.fchmod(file.fileno(), 0o644)  # other peers may be other users
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            try:
                os.link(file.name, path)
            except FileExistsError:
                return False
        return True

    def get(self, name: str) -> bytes | None:
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def names(self, folder: str) -> list[str]:
        try:
            return [name for name in os.listdir(self.path / folder) if not name.startswith(".")]
        except FileNotFoundError:
            return []

    def delete(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)


class ObjectStore(Store):
    """A place that fsspec knows by a URL, such as ``s3://bucket/job``, in a store that creates a file only if there is
    none, in one request.

    Raises:
        ValueError: the URL is of another kind of store, or the store has overwritten a file: fsspec and its
            implementations of before 2024.12 do, as do servers that do not know S3's conditional writes.
    """

    KINDS = ("s3", "s3a", "gs", "gcs", "abfs", "az", "memory")

    def __init__(self, url: str) -> None:
        kind = url.partition("://")[0]
        if kind not in self.KINDS:
            raise ValueError(
                f"the store {url} is of the kind {kind}, which may not create files whole and once; the kinds that do "
                f"are {', '.join(self.KINDS)}, or give the path of a folder"
            )
        import fsspec

        self.files, self.path = fsspec.core.url_to_fs(url)
        probe = f"probe/{uuid.uuid4().hex}"
        try:
            if self.put_new(probe, b"one") and self.put_new(probe, b"two"):
                raise ValueError(
                    f"the store {url} overwrites files, so that peers would not agree on what was written: update "
                    f"fsspec {fsspec.__version__} and its implementation for {kind}, or take a server that has "
                    "conditional writes, or give the path of a folder"
                )
        finally:
            self.delete(probe)

    def put_new(self, name: str, data: bytes) -> bool:
        try:
            self.files.pipe_file(f"{self.path}/{name}", data, mode="create")
        except Exception:  # stores have errors of their own for a file that exists
            if self.get(name) is None:
                raise
            return False
        return True

    def get(self, name: str) -> bytes | None:
        self.files.invalidate_cache()
        try:
            return bytes(self.files.cat_file(f"{self.path}/{name}"))
        except FileNotFoundError:
            return None

    def names(self, folder: str) -> list[str]:
        self.files.invalidate_cache()
        try:
            return [one.rstrip("/").rpartition("/")[2] for one in self.files.ls(f"{self.path}/{folder}", detail=False)]
        except FileNotFoundError:
            return []

    def delete(self, name: str) -> None:
        try:
            self.files.rm_file(f"{self.path}/{name}")
        except FileNotFoundError:
            return


class MissingError(ContainerError):
    """A message is not there any more."""


Members = dict[int, str]
"""The peers whose messages count in an exchange, and the runs that have sent these."""


class SharedStore(PeerCollectives):
    """Exchanges of ``LocalSGD`` and ``PeerOptimizer`` through files, among peers of which some may be late or away.

    Args:
        place: a folder that all peers see; the URL of an object store, such as ``s3://bucket/job``, for which fsspec
            and its implementation must be installed; or a ``Store``. Each job has a place of its own, and so has each
            of its models.
        peer: the number of this peer, 0 to ``peers - 1``; no other process may have it at the same time.
        peers: the largest number of peers.
        wait: seconds for which an exchange waits for peers that took part in the last two. None: a fifth of the time
            since this peer's last exchange, and at least a second, so that a slow peer hardly slows the others down.
            For peers that took part in the last one alone, it waits a twentieth. A peer that did not waits for the
            others to come, for ``wait`` or as long as it was away, so that it meets them again. The first exchange
            waits for all, for ``wait`` or a minute.
        keep: exchanges whose files are kept, for peers that were away.

    Raises:
        ValueError: an argument is outside its range.

    Attributes:
        part: of a peer whose ranks hold different parts of the model, the number of this rank. Rank 0 alone decides.
        run: see ``Message``; the same on all ranks of a peer.
    """

    part, run = 0, ""

    def __init__(
        self,
        place: str | os.PathLike[str] | Store,
        *,
        peer: int,
        peers: int,
        wait: float | None = None,
        keep: int = 100,
    ) -> None:
        super().__init__(peer, peers)
        if (wait is not None and not wait >= 0) or keep < 2:
            raise ValueError(f"wait is {wait} and keep is {keep}; wait must be 0 or more, and keep 2 or more")
        if isinstance(place, Store):
            self.store = place
        else:
            text = str(place).removeprefix("file://")
            self.store = ObjectStore(text) if "://" in text else Folder(text)
        self.wait, self.keep = wait, keep
        self._recent: dict[str, deque[frozenset[int]]] = {}
        self._ended: dict[str, float] = {}
        self._refusals: set[tuple[str, str]] = set()
        self._sent: dict[str, str] = {}  # of each sequence, the place of the last message

    def send(self, place: str, message: Message) -> bool:
        """Writes this peer's message. False: an earlier process of this peer has written another one.

        Raises:
            MismatchError: another process with this peer's number writes now. An earlier one can have written no other
                message than the first that this process would write.
        """
        name, data = self._file(place, self.peer, self.run), message.pack()
        written = self.store.put_new(name, data) or self.store.get(name) == data
        if not written:
            self._refuse_second(place)
        self._sent[place.rpartition("/")[0]] = place
        return written

    def _refuse_second(self, place: str) -> None:
        """Raises ``MismatchError`` if this process has sent before the exchange at ``place``, for which a message of
        this peer is there that it has not sent."""
        if place > self._sent.get(place.rpartition("/")[0], place):
            raise MismatchError(
                f"another process sends as peer {self.peer} now: give each process that runs at the same time a peer "
                "number of its own, and end the others"
            )

    def _file(self, place: str, peer: int, run: str) -> str:
        return f"{place}/part{self.part}/{peer}.{run}" if self.part else f"{place}/{peer}"

    def decided(self, place: str, mine: bool = False) -> Members | None:
        """Whose messages count in an exchange; None: that is open.

        Args:
            mine: whether this process has sent a message.

        Raises:
            MismatchError: it was refused, or another process has sent as this peer.
        """
        data = self.store.get(f"{place}/commit")
        if data is None:
            return None
        try:
            told = json.loads(data[:MAX_TEXT])
            members, refused = {int(peer): run for peer, run in told["members"].items()}, told["refused"]
            if not members or not all(0 <= one < self.peers and RUN.fullmatch(run) for one, run in members.items()):
                raise ValueError("members")
            reason = refused.get(str(self.peer))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise ContainerError(f"the file {place}/commit is broken: begin a new job in another place") from None
        for peer, why in refused.items():
            told_of = quoted(str(peer)), quoted(str(why))
            if told_of not in self._refusals:
                self._refusals.add(told_of)
                _log.warning("peer %s does not count in the exchange %s: %s", told_of[0], place, told_of[1])
        if reason is not None and mine:
            raise MismatchError(f"the other peers go on without peer {self.peer}: {quoted(str(reason))}")
        if self.peer in members and not mine:
            self._refuse_second(place)
        return members

    def note(self, sequence: str, members: Collection[int]) -> None:
        """Whose messages have counted in an exchange of a sequence."""
        self._recent.setdefault(sequence, deque(maxlen=2)).append(frozenset(members))

    def last(self, sequence: str) -> frozenset[int] | None:
        """Whose messages have counted in the last exchange of a sequence; None: it is the first one here."""
        recent = self._recent.get(sequence)
        return recent[-1] if recent else None

    def agree(self, place: str, sequence: str, mine: bool = True) -> Members:
        """Waits for the others' messages, and decides whose count, unless that is decided: those of the largest group
        that says the same.

        Args:
            place: of the exchange.
            sequence: of which it is one; the members of the last two are waited for.
            mine: whether this process has sent a message.

        Raises:
            MismatchError: this peer was refused.
            ContainerError: there is nothing but broken messages.
        """
        recent = self._recent.get(sequence) or [frozenset(range(self.peers))]
        steady, last = frozenset.intersection(*recent), recent[-1]
        began = time.monotonic()
        period = began - self._ended[sequence] if sequence in self._ended else None
        limit = patience = 60.0 if self.wait is None else self.wait
        if period is not None and self.wait is None:
            limit, patience = max(1.0, period / 5), max(1.0, period)
        grace = limit if period is None else min(limit, max(_GRACE, period / 20))
        since = began if self.peer in last else None  # the others' clock: that of a peer that meets them again
        there: dict[int, Message | str] = {}
        while (members := self.decided(place, mine)) is None:
            for name in self.store.names(place):
                if name.isdecimal() and int(name) < self.peers and not isinstance(there.get(int(name)), Message):
                    there[int(name)] = _unpacked(self.store.get(f"{place}/{int(name)}") or b"")
            valid, now = {peer for peer, one in there.items() if isinstance(one, Message)}, time.monotonic()
            if since is None and valid - {self.peer}:
                since = now
            waited = -1.0 if since is None else now - since
            over = waited >= limit or now - began >= max(limit, patience)
            if valid and (valid >= last | steady or (waited >= grace and valid >= steady) or over):
                self.store.put_new(f"{place}/commit", _commit(there))
                continue
            if there and over:
                raise ContainerError(f"there are only broken messages in {place}: {next(iter(there.values()))}")
            time.sleep(min(max(_POLL[0], (now - began) / 8), _POLL[1]))
        self._ended[sequence] = time.monotonic()
        return members

    def _get(self, name: str) -> bytes | None:
        """A file that counts: it is read again if the store gives an error."""
        for seconds in AGAIN:
            try:
                return self.store.get(name)
            except Exception as error:  # stores have errors of their own
                _log.warning("the file %s cannot be read (%s): it is tried again", name, error)
                time.sleep(seconds)
        return self.store.get(name)

    def messages(self, place: str, members: Members) -> dict[int, Message]:
        """What the members have sent of this rank's part.

        Raises:
            MissingError: one is not there any more.
            ContainerError: one is broken.
        """
        found = {}
        for peer in sorted(members):
            name = self._file(place, peer, members[peer])
            data = self._get(name)
            if data is None:
                raise MissingError(f"the file {name} is missing")
            message = _unpacked(data)
            if isinstance(message, str):
                raise ContainerError(f"the file {name} is broken: {message}")
            found[peer] = message
        return found

    def forget(self, place: str) -> None:
        """Deletes this peer's message of an exchange. The commit stays: nobody can decide the exchange again."""
        self.store.delete(self._file(place, self.peer, self.run))


def _commit(there: Mapping[int, Message | str]) -> bytes:
    """The content of a commit of these messages, or what is wrong with them; one counts at least."""
    members, refused = largest_group(there)
    told = {"members": {str(peer): one.run for peer, one in members.items()}, "refused": refused}
    return json.dumps(told).encode()


def _unpacked(data: bytes) -> Message | str:
    """A message, or what is wrong with it."""
    try:
        return Message.unpack(data)
    except ValueError as error:
        return str(error)
