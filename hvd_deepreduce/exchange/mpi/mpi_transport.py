"""The transport over MPI: the messages of programs."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from mpi4py import MPI

from hvd_deepreduce.codecs.interfaces import U8
from hvd_deepreduce.exchange.mpi import messages
from hvd_deepreduce.exchange.mpi.messages import Label
from hvd_deepreduce.exchange.mpi.private_comm import Backoff, NoticeError, PrivateComm, log
from hvd_deepreduce.exchange.mpi.transport import EMPTY, MAX_SLICES, Program, Receive, Transport
from hvd_deepreduce.exchange.traffic import Traffic

MAX_RECEIVES = 2
"""Messages of one sender and phase that are received at the same time: earlier slices are complete before later ones
start."""
CHUNK = 1 << 30
"""The most bytes of an MPI message, whose count has 31 bits. A longer message travels as several, of which each but the
last has ``CHUNK`` bytes."""
TAGS = 4096
"""MPI's tags of one exchange: more than ``message_tag`` gives. The next exchange has others, so that what a fault has
left behind does not come there. MPI has at least 32768 tags, so they are used again after 7 exchanges or more."""


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
            if isinstance(error, NoticeError):
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
