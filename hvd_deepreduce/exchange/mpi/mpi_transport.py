"""The transport over MPI: a private communicator, waiting with a time limit, and the messages of programs."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mpi4py import MPI

from hvd_deepreduce.codecs.interfaces import U8
from hvd_deepreduce.exchange import traffic
from hvd_deepreduce.exchange.mpi import messages
from hvd_deepreduce.exchange.mpi.errors import LostRankError
from hvd_deepreduce.exchange.mpi.messages import Label
from hvd_deepreduce.exchange.mpi.transport import EMPTY, MAX_SLICES, Program, Receive, Transport, describe
from hvd_deepreduce.exchange.traffic import NOTHING, Traffic

U64 = np.ndarray[Any, np.dtype[np.uint64]]
MAX_RECEIVES = 2
"""Messages of one sender and phase that are received at the same time: earlier slices are complete before later ones
start."""
CHUNK = 1 << 30
"""The most bytes of an MPI message, whose count has 31 bits. A longer message travels as several, of which each but the
last has ``CHUNK`` bytes."""
NOTICE_TAG = 0
"""MPI's tag of a notice that its sender has left."""
TAGS = 4096
"""MPI's tags of one exchange: more than ``message_tag`` gives. The next exchange has others, so that what a fault has
left behind does not come there. MPI has at least 32768 tags, so they are used again after 7 exchanges or more."""
NOTICE_BYTES = 600
KEPT: list[object] = []
"""Requests that were given up, with their buffers: MPI may still read and write these until the process ends."""
log = logging.getLogger("hvd_deepreduce")


def stall_warning() -> float | None:
    """Seconds between warnings while this rank waits for others to come: Horovod's setting."""
    if os.environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
        return None
    return _seconds("HOROVOD_STALL_CHECK_TIME_SECONDS") or 60.0


def stall_limit() -> float | None:
    """Seconds after which a rank that does not come counts as lost: Horovod's setting. None: no limit."""
    return _seconds("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")


def _seconds(variable: str) -> float | None:
    """A positive number of seconds; None where the variable is not set to one, as for Horovod."""
    try:
        seconds = float(os.environ.get(variable, 0))
    except ValueError:
        return None
    return seconds if seconds > 0 else None


class Backoff:
    """Waits between polls. At first after progress a wait only yields the core, because what is awaited is likely to
    come soon. After that, waits sleep 50, 100, 200, ... up to 500 microseconds, because other threads, and ranks that
    share this core, may need it.

    Args:
        comm: the communicator that the awaited message comes over.
        limit: seconds without progress after which ``wait`` raises. None: no limit; ``wait`` warns.
        yields: seconds after progress in which no wait sleeps.
    """

    SHORT, LONG = 30e-6, 300e-6
    """Of ``yields``: for the messages of three ranks or more, which compute between them; and for all else."""
    FIRST_SLEEP, LONGEST_SLEEP = 50e-6, 500e-6

    def __init__(self, comm: PrivateComm, limit: float | None, yields: float) -> None:
        self.comm, self.limit, self.yields = comm, limit, yields
        self.warning = stall_warning() if limit is None else None
        self.reset()

    def reset(self) -> None:
        """To be called when a poll found progress."""
        self.sleep = self.FIRST_SLEEP
        self.began = self.warned = time.monotonic()

    def wait(self, sender: Callable[[], str]) -> None:
        """To be called when a poll found nothing.

        Args:
            sender: returns what this rank waits for, for the error's text.

        Raises:
            LostRankError: there was no progress within the limit, or a rank has left.
        """
        now = time.monotonic()
        if now - self.began < self.yields:
            os.sched_yield()
            return
        time.sleep(self.sleep)
        self.sleep = min(2 * self.sleep, self.LONGEST_SLEEP)
        self.comm.check_notices()
        if self.limit is not None and now - self.began > self.limit:
            raise LostRankError(f"rank {self.comm.rank} had no message from {sender()} for {self.limit:g} s")
        if self.warning is not None and now - self.warned > self.warning:
            self.warned = now
            log.warning(
                "rank %d has waited %.0f s for %s to start exchange %d. The ranks that do not say so are missing: they "
                "may be busy, or have stopped, or wait for something else",
                self.comm.rank, now - self.began, sender(), self.comm.sequence,
            )  # fmt: skip


def check_intracomm(comm: object) -> None:
    """``TypeError`` unless ``comm`` is an intracommunicator."""
    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        raise TypeError(f"comm is {comm!r}; an mpi4py intracommunicator, such as MPI.COMM_WORLD, is required")


class PrivateComm:
    """A duplicate of a communicator, for the exchanges only. It is made once per communicator and cached as an MPI
    attribute of it, and freed with it.

    Attributes:
        rank, size: of the communicator.
        tags: the number of tags that MPI has.
        lock: held during an allreduce.
        sequence: the number of exchanges that this rank has begun over it.
        traffic: of this rank over it, notices and ``Idup`` left out.
        lost: None, or why the communicator cannot be used again.
        stop: None, or why this rank must leave what it waits for.
        closing: whether this rank will begin no exchange any more.
    """

    _keyval: int | None = None

    def __init__(self, comm: MPI.Intracomm, patience: float | None) -> None:
        self.lock = threading.Lock()
        self.sequence = 0
        self.traffic = NOTHING
        self.lost: str | None = None
        self.stop: str | None = None
        self.closing = False
        self.comm = MPI.COMM_NULL  # no notice can come before the duplicate is there
        self.rank, self.size = comm.rank, comm.size
        self.tags = 1 + (MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767)
        made, request = comm.Idup()
        self.wait(request, patience, made)
        made.Set_errhandler(MPI.ERRORS_RETURN)
        self.comm = made

    @classmethod
    def of(cls, comm: MPI.Intracomm, patience: float | None = None) -> PrivateComm:
        """The communicator's duplicate. The first call for a communicator is collective.

        Args:
            patience: seconds to wait for the other ranks' calls; None: no limit.

        Raises:
            TypeError: ``comm`` is not an intracommunicator.
            LostRankError: not all ranks made this call in time.
        """
        check_intracomm(comm)
        if cls._keyval is None:
            cls._keyval = MPI.Comm.Create_keyval(delete_fn=_free)
        cached: Any = comm.Get_attr(cls._keyval)
        private: PrivateComm = cls(comm, patience) if cached is None else cached
        if cached is None:
            comm.Set_attr(cls._keyval, private)
        return private

    def check_usable(self) -> None:
        """``LostRankError`` if an earlier exchange was given up."""
        if self.lost is not None:
            raise LostRankError(
                f"an earlier exchange over this communicator was aborted ({self.lost}): create a new communicator of "
                "the remaining ranks"
            )

    def count(self, more: Traffic) -> None:
        """Adds to ``traffic``."""
        self.traffic = Traffic(self.traffic.sent + more.sent, self.traffic.received + more.received)

    def wait(self, request: MPI.Request, limit: float | None, *buffers: object) -> None:
        """Waits for a collective operation.

        Args:
            limit: seconds; None: no limit, and warnings.
            buffers: that MPI uses until then.

        Raises:
            LostRankError: it was not complete within the limit, a rank has left, or MPI reports an error.
        """
        backoff = Backoff(self, limit, Backoff.LONG)
        try:
            while not request.Test():
                backoff.wait(lambda: "the other ranks")
        except BaseException as error:
            raise self.abandon(error, request, buffers) from None

    def abandon(self, error: BaseException, *kept: object) -> BaseException:
        """Gives the communicator up, and tells the other ranks, which may be waiting for this one.

        Args:
            error: why.
            kept: requests that are not complete, and their buffers.

        Returns:
            What the caller must raise: a ``LostRankError``, or ``error`` itself where it must end the program.
        """
        KEPT.append((self.comm, kept))
        if self.closing:
            text = f"rank {self.rank} has closed its exchanges"
        elif isinstance(error, LostRankError):
            text = str(error)
        else:
            text = f"rank {self.rank} left the exchange: {describe(error)}"
        if self.lost is None:
            self.lost = text
            if not isinstance(error, _NoticeError):
                self._give_notice(text)
        return LostRankError(f"a rank is lost: {text}") if isinstance(error, Exception) else error

    def _give_notice(self, text: str) -> None:
        if self.comm == MPI.COMM_NULL or MPI.Is_finalized():
            return
        notice = np.frombuffer(text.encode(errors="backslashreplace")[:NOTICE_BYTES], np.uint8)
        for rank in range(self.size):
            if rank != self.rank:
                try:
                    KEPT.append((notice, self.comm.Isend([notice, MPI.BYTE], rank, NOTICE_TAG)))
                except MPI.Exception:
                    pass  # that rank is gone

    def check_notices(self) -> None:
        """``LostRankError`` if another rank has left, or this rank must."""
        if self.stop is not None:
            raise LostRankError(self.stop)
        if self.comm == MPI.COMM_NULL:
            return
        status = MPI.Status()
        if self.comm.Iprobe(MPI.ANY_SOURCE, NOTICE_TAG, status):
            text = np.zeros(min(NOTICE_BYTES, max(0, status.Get_count(MPI.BYTE))), np.uint8)
            self.comm.Recv([text, MPI.BYTE], status.source, NOTICE_TAG)
            raise _NoticeError(text.tobytes().decode(errors="replace"))

    def allreduce(self, values: U64, op: MPI.Op, limit: float | None) -> U64:
        """MPI's allreduce of a few numbers, uint64 ``[n]``, the same ``n`` on all ranks; ``limit`` as for ``wait``."""
        out = np.empty_like(values)
        self.count(traffic.allreduce(values.nbytes, self.size))
        self.wait(self.comm.Iallreduce(values, out, op), limit, values, out)
        return out

    def allgather(self, own: U8, limit: float | None) -> U8:
        """MPI's allgather of a few bytes, uint8 ``[n]`` to ``[size, n]``, the same ``n`` on all ranks."""
        gathered = np.empty((self.size, own.size), np.uint8)
        self.count(traffic.allgather(own.size, gathered.size, self.size))
        self.wait(self.comm.Iallgather(own, gathered), limit, own, gathered)
        return gathered


class _NoticeError(LostRankError):
    """Another rank has left, and has told all ranks."""


def _free(comm: MPI.Comm, keyval: int, private: PrivateComm) -> None:
    if private.lost is None and not MPI.Is_finalized() and comm != MPI.COMM_WORLD:
        private.comm.Free()


@dataclass
class _Incoming:
    """A message that is being received, for the program number ``slot``.

    Attributes:
        receive: what the program waits for.
        request: of the MPI message that is under way.
        announced: its size, as MPI gives it.
        chunks: the arrays that it and the MPI messages before it go to.
    """

    receive: Receive
    slot: int
    request: MPI.Request = field(default_factory=lambda: MPI.REQUEST_NULL)
    announced: int = 0
    chunks: list[U8] = field(default_factory=list)


class MPITransport(Transport):
    """The messages of one allreduce over MPI.

    Sends and receives are non-blocking. A receiver learns a message's size from MPI (matched probe), then allocates,
    but never more than the largest message that the program can get.

    Args:
        comm: of these ranks.
        label: of the exchange; every message has it, and must have it.
        timeout: seconds without any message after which a rank counts as lost.
    """

    def __init__(self, comm: PrivateComm, label: Label, timeout: float) -> None:
        super().__init__(comm.rank, comm.size)
        self.comm, self.label, self.timeout = comm, label, timeout
        self.first_tag = 1 + label.sequence % ((comm.tags - 1) // TAGS) * TAGS
        self.sending: deque[tuple[MPI.Request, U8, int]] = deque()
        self.receiving: list[_Incoming] = []
        self.begun: dict[int, _Incoming] = {}  # by slot: messages of which more is to come

    def send(self, to: int, tag: int, sections: list[U8]) -> None:
        message = self.attempt(None, messages.pack, self.label, self.rank, tag, sections)
        if message is None:
            message = messages.pack(self.label, self.rank, tag, [])
        self.comm.count(Traffic(sent=message.size))
        for begin in range(0, message.size, CHUNK):
            chunk = message[begin : begin + CHUNK]
            request = self.comm.comm.Isend([chunk, chunk.size, MPI.BYTE], to, self.first_tag + tag)
            self.sending.append((request, chunk, to))

    def run(self, programs: list[Program]) -> None:
        """Runs the programs to their ends, and completes all sends.

        Raises:
            LostRankError: no message came within the timeout, a rank has left, or MPI reports an error.
        """
        backoff = Backoff(self.comm, self.timeout, Backoff.LONG if self.size <= 2 else Backoff.SHORT)
        waiting: dict[int, Receive] = {}
        try:
            slot = 0
            while slot < len(programs) or waiting or self.receiving or self.sending:
                if self._start_receives(waiting) | self._finish_receives(programs, waiting) | self._finish_sends():
                    backoff.reset()
                elif slot < len(programs):  # MPI makes progress between them
                    self._resume(slot, programs[slot], None, waiting)
                    slot += 1
                else:
                    backoff.wait(lambda: self._awaited(waiting))
        except BaseException as error:
            if isinstance(error, _NoticeError):
                log.warning("rank %d was waiting for %s when another rank left", self.rank, self._awaited(waiting))
            raise self.comm.abandon(error, self.sending, self.receiving) from None

    def _awaited(self, waiting: dict[int, Receive]) -> str:
        """The ranks whose messages or receives are missing."""
        ranks = {receive.source for receive in waiting.values()} | {to for _, _, to in self.sending}
        ranks |= {incoming.receive.source for incoming in self.receiving}
        return "rank " + ", ".join(map(str, sorted(ranks)))

    def _resume(self, slot: int, program: Program, sections: list[U8] | None, waiting: dict[int, Receive]) -> None:
        try:
            waiting[slot] = next(program) if sections is None else program.send(sections)
        except StopIteration:
            pass

    def _start_receives(self, waiting: dict[int, Receive]) -> bool:
        """Starts to receive messages that have been announced, lower slots first. Whether there was one."""
        started = False
        status = MPI.Status()
        active: dict[tuple[int, int], int] = {}
        for incoming in self.receiving:
            line = _line(incoming.receive)
            active[line] = active.get(line, 0) + 1
        for slot in sorted(waiting):
            receive = waiting[slot]
            line = _line(receive)
            if active.get(line, 0) >= MAX_RECEIVES:
                continue
            announced = self.comm.comm.Improbe(receive.source, self.first_tag + receive.tag, status)
            if announced is None:
                # No slot needs another slot's messages, so later slots of this line can wait for this one.
                active[line] = MAX_RECEIVES
                continue
            incoming = self.begun.pop(slot) if slot in self.begun else _Incoming(receive, slot)
            incoming.announced = status.Get_elements(MPI.BYTE)
            incoming.chunks.append(self._room(incoming))
            incoming.request = announced.Irecv([incoming.chunks[-1], MPI.BYTE])
            self.receiving.append(incoming)
            del waiting[slot]
            active[line] = active.get(line, 0) + 1
            started = True
        return started

    def _room(self, incoming: _Incoming) -> U8:
        """Where the announced bytes go.

        Raises:
            ValueError: no program's message is so long.
            MemoryError: there is no memory for it.
        """
        # A message that is not received stays in MPI, so after these errors the communicator cannot be used. To receive
        # it into less memory is no way out: Open MPI 4.1 may then write outside.
        receive, announced = incoming.receive, incoming.announced
        limit = messages.largest(receive.sections, receive.elements)
        size = sum(chunk.size for chunk in incoming.chunks) + announced
        if not 0 <= announced <= size <= limit:
            raise ValueError(
                f"cannot read a message of rank {receive.source}: it has {size} bytes; at most {limit} are allowed"
            )
        return np.empty(announced, np.uint8)

    def _finish_receives(self, programs: list[Program], waiting: dict[int, Receive]) -> bool:
        """Resumes the programs whose messages are complete. Whether there was one."""
        finished = False
        for incoming in list(self.receiving):
            if not incoming.request.Test():
                continue
            self.receiving.remove(incoming)
            self.comm.count(Traffic(received=incoming.announced))
            finished = True
            slot, receive = incoming.slot, incoming.receive
            if _more_to_come(incoming):
                waiting[slot], self.begun[slot] = receive, incoming
                continue
            message = self.attempt(EMPTY, _joined, incoming.chunks)
            if messages.is_stale(message, self.label):
                waiting[slot] = receive  # a copy of an earlier exchange's message: this one's is still to come
                continue
            sections = self.attempt(None, self._read, message, receive)
            self._resume(slot, programs[slot], sections or [EMPTY] * receive.sections, waiting)
        return finished

    def _read(self, message: U8, receive: Receive) -> list[U8] | None:
        """The sections of a message; None if its sender has failed."""
        found = messages.unpack(message, self.label, receive.source, receive.tag, receive.sections)
        if found is None:
            self.failure = ""  # the sender reports the error itself
        return found

    def _finish_sends(self) -> bool:
        """Releases messages that have left, in order, because every test makes MPI poll all its connections. Whether
        there was one."""
        finished = False
        while self.sending and self.sending[0][0].Test():
            self.sending.popleft()
            finished = True
        return finished


def _line(receive: Receive) -> tuple[int, int]:
    """Messages with the same come in the order of their slots: the sender, and the phase of the tag."""
    return receive.source, receive.tag // MAX_SLICES


def _more_to_come(incoming: _Incoming) -> bool:
    """Whether another MPI message belongs to this message.

    Raises:
        ValueError: it travels in parts, and they are not those that its sender must have made. Then nobody knows how
            many parts follow, so the communicator cannot be used.
    """
    receive, announced = incoming.receive, incoming.announced
    size, received = messages.size_of(incoming.chunks[0]), sum(chunk.size for chunk in incoming.chunks)
    if CHUNK < size <= messages.largest(receive.sections, receive.elements):
        if announced == min(CHUNK, size - received + announced):
            return received < size
    elif announced < CHUNK or size == CHUNK:
        return False  # one part; ``messages.unpack`` checks it
    raise ValueError(
        f"cannot read a message of rank {receive.source}: its header announces {size} bytes in parts of {CHUNK}, and "
        f"{received} bytes have come, {announced} of them in the last part"
    )


def _joined(chunks: list[U8]) -> U8:
    return chunks[0] if len(chunks) == 1 else np.concatenate(chunks)
