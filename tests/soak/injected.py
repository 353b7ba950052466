"""Faults that are put into a step of one rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

from hvd_deepreduce.pipeline import Pipeline

LEAST_BYTES = 2048
"""Smaller allocations do not fail: an error's own text needs some memory too."""


class UserError(RuntimeError):
    """What the user's code raises."""


def stop(seconds: float) -> None:
    """Stops this process for so long. A process of the shell continues it."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds:.2f}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def kill() -> None:
    """Ends this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    """Raises as the user's code would."""
    raise UserError("the user's code failed")


def _module(frame: Any) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name


class Allocations:
    """Counts the package's allocations with NumPy, and lets one fail.

    Attributes:
        counted: how many there were.
        failed: whether one was made to fail.
        in_exchange: whether that was in an exchange over MPI, which must tell the other ranks.
    """

    NAMES = ("empty", "zeros", "concatenate", "empty_like", "zeros_like", "ascontiguousarray")

    def __init__(self) -> None:
        self.counted = 0
        self.failed = self.in_exchange = False
        self._which: int | None = None

    @contextmanager
    def watched(self, point: float | None = None) -> Iterator[None]:
        """Counts the allocations inside.

        Args:
            point: 0 to 1: the allocation that fails, as a part of those that were counted before. None: none fails.
        """
        self._which = None if point is None else int(point * self.counted)
        self.counted = 0
        with mock.patch.multiple(np, **{name: self._counting(getattr(np, name)) for name in self.NAMES}):
            yield

    def _counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def allocate(*arguments: Any, **keywords: Any) -> Any:
            made = function(*arguments, **keywords)
            caller = _module(frame := sys._getframe(1))
            if caller.startswith("hvd_deepreduce") and made.nbytes >= LEAST_BYTES:
                if self.counted == self._which and not self.failed:
                    self.failed = True
                    while frame is not None:
                        self.in_exchange |= _module(frame).startswith("hvd_deepreduce.exchange")
                        frame = frame.f_back
                    raise MemoryError(f"cannot allocate {made.nbytes} bytes in {caller}")
                self.counted += 1
            return made

        return allocate


def flipped(data: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A copy in which one bit is another."""
    copy = np.ascontiguousarray(data).copy()
    if copy.nbytes:
        octets = copy.view(np.uint8).reshape(-1)
        octets[rng.integers(octets.size)] ^= np.uint8(1 << rng.integers(8))
    return copy


@contextmanager
def corrupted_container(rng: np.random.Generator) -> Iterator[None]:
    """One bit flips in the first container that is encoded inside."""
    encode, done = Pipeline.encode, []

    def broken(self: Pipeline, *arguments: Any, **keywords: Any) -> Any:
        packed = encode(self, *arguments, **keywords)
        if done:
            return packed
        done.append(True)
        return flipped(packed, rng)

    with mock.patch.object(Pipeline, "encode", broken):
        yield


class Messages:
    """Counts the messages of exchanges over MPI that this rank sends, and lets one be damaged or cut off.

    Attributes:
        counted: how many there were.
    """

    def __init__(self) -> None:
        self.counted = 0
        self._which = -1
        self._kept: list[np.ndarray] = []  # until MPI has sent them

    @contextmanager
    def watched(
        self, point: float | None = None, rng: np.random.Generator | None = None, hook: Callable[[], None] | None = None
    ) -> Iterator[None]:
        """Counts the messages inside, and the cards that a tensor travels on.

        Args:
            point: 0 to 1: the message that has the fault, as a part of those that were counted before. None: none has.
            rng: with it, a bit of the message flips, as on a bad link: after it was packed.
            hook: is called before the message.
        """
        from hvd_deepreduce.exchange.mpi import announcement
        from hvd_deepreduce.exchange.mpi.mpi_transport import MPITransport

        self._which = -1 if point is None else int(point * self.counted)
        self.counted = 0
        send, pack = MPITransport.send, announcement.pack

        def next_has_the_fault() -> bool:
            this = self.counted == self._which
            self.counted += 1
            if this and hook is not None:
                hook()
            return this

        def packing(*arguments: Any) -> np.ndarray:
            card = pack(*arguments)
            section = announcement.read(card).section
            if section is not None and next_has_the_fault() and rng is not None:
                section[:] = flipped(section, rng)
            return card

        def watching(transport: Any, *arguments: Any) -> None:
            this = next_has_the_fault()
            private = transport.comm
            real = private.comm
            if this and rng is not None:
                private.comm = _Corrupting(real, rng, self._kept)
            try:
                send(transport, *arguments)
            finally:
                private.comm = real

        with mock.patch.object(MPITransport, "send", watching), mock.patch.object(announcement, "pack", packing):
            yield


class _Corrupting:
    """A communicator that flips a bit of what it sends."""

    def __init__(self, comm: Any, rng: np.random.Generator, kept: list[np.ndarray]) -> None:
        self._comm, self._rng, self._kept = comm, rng, kept

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def Isend(self, buffer: Any, *arguments: Any) -> Any:  # noqa: N802  (MPI's name)
        array, *rest = buffer
        self._kept.append(flipped(array, self._rng))
        return self._comm.Isend([self._kept[-1], *rest], *arguments)
