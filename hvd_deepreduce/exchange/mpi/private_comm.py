"""A private communicator for the exchanges: waiting with a time limit, and notices that a rank has left."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from hvd_deepreduce.codecs.interfaces import U8
from hvd_deepreduce.exchange import traffic
from hvd_deepreduce.exchange.mpi.errors import LostRankError
from hvd_deepreduce.exchange.mpi.transport import describe
from hvd_deepreduce.exchange.traffic import NOTHING, Traffic
from hvd_deepreduce.ops.types import U64

NOTICE_TAG = 0
"""MPI's tag of a notice that its sender has left."""
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
    """``TypeError`` unless ``comm`` is an intracommunicator; ``RuntimeError`` if MPI has ended."""
    if MPI.Is_finalized():
        raise RuntimeError("MPI has ended (MPI_Finalize), so nothing can be exchanged any more")
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
        """The communicator's duplicate. The first call for a communicator is collective, and is made by one thread of
        each rank.

        Args:
            patience: seconds to wait for the other ranks' calls; None: no limit.

        Raises:
            TypeError: ``comm`` is not an intracommunicator.
            RuntimeError: MPI has ended.
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
            if not isinstance(error, NoticeError):
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
            raise NoticeError(text.tobytes().decode(errors="replace"))

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


class NoticeError(LostRankError):
    """Another rank has left, and has told all ranks."""


def _free(comm: MPI.Comm, keyval: int, private: PrivateComm) -> None:
    if private.lost is None and not MPI.Is_finalized() and comm != MPI.COMM_WORLD:
        private.comm.Free()
