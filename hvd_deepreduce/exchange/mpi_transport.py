"""The transport over MPI: a private communicator, waiting with a time limit, and the messages of programs."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from hvd_deepreduce.codec import U8
from hvd_deepreduce.exchange.errors import LostRankError
from hvd_deepreduce.exchange.transport import EMPTY, Program, Receive, Transport, split_message

U64 = np.ndarray[Any, np.dtype[np.uint64]]
MAX_RECEIVES = 2
"""Messages from one sender that are received at the same time: earlier slices are complete before later ones start."""


class Backoff:
    """Waits between polls, longer each time, because other ranks may need this core. The first wait only yields the
    core; the next ones sleep 50, 100, 200, ... up to 500 microseconds.

    Args:
        timeout: seconds without progress after which ``wait`` raises.
    """

    YIELDS = 1
    FIRST_SLEEP, LONGEST_SLEEP = 50e-6, 500e-6

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.reset()

    def reset(self) -> None:
        """To be called when a poll found progress."""
        self.polls = 0
        self.deadline = time.monotonic() + self.timeout

    def wait(self, sender: str) -> None:
        """To be called when a poll found nothing.

        Args:
            sender: what this rank waits for, for the error's text.

        Raises:
            LostRankError: there was no progress within the timeout.
        """
        self.polls += 1
        if self.polls <= self.YIELDS:
            os.sched_yield()
            return
        time.sleep(min(self.LONGEST_SLEEP, self.FIRST_SLEEP * 2 ** min(self.polls - self.YIELDS - 1, 16)))
        if time.monotonic() > self.deadline:
            raise LostRankError(f"no message from {sender} for {self.timeout:g} s")


def check_intracomm(comm: object) -> None:
    """``TypeError`` unless ``comm`` is an intracommunicator."""
    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        raise TypeError(f"comm is {comm!r}; an mpi4py intracommunicator, such as MPI.COMM_WORLD, is required")


class PrivateComm:
    """A duplicate of a communicator, for the exchanges only. It is made once per communicator and cached as an MPI
    attribute of it, and freed with it.

    Attributes:
        rank, size: of the communicator.
        lock: held during an allreduce.
        bytes_sent: bytes of all messages that this rank has sent over it.
        timeout: seconds without any message after which a rank counts as lost.
        abandoned: None, or the buffers and requests of an allreduce that ended with an error: MPI may still write to
            them, so they are kept, and the communicator is not used again.
    """

    _keyval: int | None = None

    def __init__(self, comm: MPI.Intracomm, timeout: float) -> None:
        self.lock = threading.Lock()
        self.abandoned: object = None
        self.bytes_sent = 0
        self.timeout = timeout
        self.comm, request = comm.Idup()
        self.wait(request)
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank, self.size = self.comm.rank, self.comm.size

    @classmethod
    def of(cls, comm: MPI.Intracomm, timeout: float) -> PrivateComm:
        """The communicator's duplicate. The first call for a communicator is collective.

        Raises:
            TypeError: ``comm`` is not an intracommunicator.
            LostRankError: not all ranks made this call within the timeout.
        """
        check_intracomm(comm)
        if cls._keyval is None:
            cls._keyval = MPI.Comm.Create_keyval(delete_fn=_free)
        cached: Any = comm.Get_attr(cls._keyval)
        private: PrivateComm = cls(comm, timeout) if cached is None else cached
        if cached is None:
            comm.Set_attr(cls._keyval, private)
        private.timeout = timeout
        return private

    def wait(self, request: MPI.Request) -> None:
        """Waits for a collective operation.

        Raises:
            LostRankError: it was not complete within the timeout, or MPI reports an error.
        """
        backoff = Backoff(self.timeout)
        try:
            while not request.Test():
                backoff.wait("the other ranks")
        except (LostRankError, MPI.Exception) as error:
            self.abandoned = request
            raise LostRankError(
                f"a rank is lost: {error}; every rank of the communicator must call the exchange"
            ) from None

    def allreduce(self, values: U64, op: MPI.Op) -> U64:
        """MPI's allreduce of a few numbers, uint64 ``[n]``, the same ``n`` on all ranks."""
        out = np.empty_like(values)
        self.wait(self.comm.Iallreduce(values, out, op))
        return out

    def allgather(self, own: U8) -> U8:
        """MPI's allgather of a few bytes, uint8 ``[n]`` to ``[size, n]``, the same ``n`` on all ranks."""
        gathered = np.empty((self.size, own.size), np.uint8)
        self.wait(self.comm.Iallgather(own, gathered))
        return gathered


def _free(comm: MPI.Comm, keyval: int, private: PrivateComm) -> None:
    if private.abandoned is None and not MPI.Is_finalized() and comm != MPI.COMM_WORLD:
        private.comm.Free()


class _Incoming(NamedTuple):
    """A message of so many ``sections`` that is being received, for the program number ``slot``."""

    request: MPI.Request
    data: U8
    source: int
    slot: int
    sections: int


class MPITransport(Transport):
    """The messages of one allreduce over MPI.

    Sends and receives are non-blocking. A receiver learns a message's size from MPI (matched probe), then allocates."""

    def __init__(self, comm: PrivateComm) -> None:
        super().__init__(comm.rank, comm.size)
        self.comm = comm
        self.sending: deque[tuple[MPI.Request, U8, int]] = deque()
        self.receiving: list[_Incoming] = []

    def send(self, to: int, tag: int, sections: list[U8]) -> None:
        message = EMPTY
        if self.failure is None:
            message = sections[0] if len(sections) == 1 else np.concatenate(sections)
        # Counted in words of 8 bytes, so that MPI's 31-bit counts reach 16 GiB.
        request = self.comm.comm.Isend([message, message.size // 8, MPI.UINT64_T], to, tag)
        self.sending.append((request, message, to))
        self.comm.bytes_sent += message.size

    def run(self, programs: list[Program]) -> None:
        """Runs the programs to their ends, and completes all sends.

        Raises:
            LostRankError: no message came within the timeout, or MPI reports an error.
        """
        backoff = Backoff(self.comm.timeout)
        waiting: dict[int, Receive] = {}
        try:
            for slot, program in enumerate(programs):
                self._resume(slot, program, None, waiting)
            while waiting or self.receiving or self.sending:
                if self._start_receives(waiting) | self._finish_receives(programs, waiting) | self._finish_sends():
                    backoff.reset()
                else:
                    ranks = {receive.source for receive in waiting.values()} | {to for _, _, to in self.sending}
                    ranks |= {incoming.source for incoming in self.receiving}
                    backoff.wait("rank " + ", ".join(map(str, sorted(ranks))))
        except BaseException as error:
            # MPI may still write to these buffers.
            self.comm.abandoned = (self.sending, self.receiving)
            if isinstance(error, LostRankError | MPI.Exception):
                raise LostRankError(f"a rank is lost: {error}") from None
            raise

    def _resume(self, slot: int, program: Program, sections: list[U8] | None, waiting: dict[int, Receive]) -> None:
        try:
            waiting[slot] = next(program) if sections is None else program.send(sections)
        except StopIteration:
            pass

    def _start_receives(self, waiting: dict[int, Receive]) -> bool:
        """Starts to receive messages that have been announced, lower slots first. Whether there was one."""
        started = False
        status = MPI.Status()
        active: dict[int, int] = {}
        for incoming in self.receiving:
            active[incoming.source] = active.get(incoming.source, 0) + 1
        for slot in sorted(waiting):
            source, tag, sections = waiting[slot]
            if active.get(source, 0) >= MAX_RECEIVES:
                continue
            announced = self.comm.comm.Improbe(source, tag, status)
            if announced is None:
                # No slot needs another slot's messages, so this sender's later slots can wait for this one.
                active[source] = MAX_RECEIVES
                continue
            data = np.empty(8 * status.Get_count(MPI.UINT64_T), np.uint8)
            request = announced.Irecv([data, data.size // 8, MPI.UINT64_T])
            self.receiving.append(_Incoming(request, data, source, slot, sections))
            del waiting[slot]
            active[source] = active.get(source, 0) + 1
            started = True
        return started

    def _finish_receives(self, programs: list[Program], waiting: dict[int, Receive]) -> bool:
        """Resumes the programs whose messages are complete. Whether there was one."""
        finished = False
        for incoming in list(self.receiving):
            if incoming.request.Test():
                self.receiving.remove(incoming)
                if not incoming.data.size and self.failure is None:
                    self.failure = ""  # the sender has failed, and reports the error itself
                missing = [EMPTY] * incoming.sections
                sections = self.attempt(missing, split_message, incoming.data, incoming.sections, incoming.source)
                self._resume(incoming.slot, programs[incoming.slot], sections, waiting)
                finished = True
        return finished

    def _finish_sends(self) -> bool:
        """Releases messages that have left, in order, because every test makes MPI poll all its connections. Whether
        there was one."""
        finished = False
        while self.sending and self.sending[0][0].Test():
            self.sending.popleft()
            finished = True
        return finished
