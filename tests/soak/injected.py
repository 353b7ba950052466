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


class _Corrupting:
    """A communicator that flips a bit of the message number ``which``, as a bad link would: after it was packed."""

    def __init__(self, comm: Any, state: dict[str, int], rng: np.random.Generator) -> None:
        self._comm, self._state, self._rng = comm, state, rng

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def Isend(self, buffer: Any, *arguments: Any) -> Any:  # noqa: N802  (MPI's name)
        self._state["sent"] += 1
        if self._state["sent"] == self._state["which"]:
            array, *rest = buffer
            broken = flipped(array, self._rng)
            self._state["kept"] = broken  # type: ignore[assignment]  (until MPI has sent it)
            buffer = [broken, *rest]
        return self._comm.Isend(buffer, *arguments)


@contextmanager
def on_messages(which: int, rng: np.random.Generator | None, hook: Callable[[], None] | None = None) -> Iterator[None]:
    """One bit flips in the message with this number, from 1 on, that an exchange over MPI sends inside; or ``hook`` is
    called before that message."""
    from hvd_deepreduce.exchange.mpi_transport import MPITransport

    send, state = MPITransport.send, {"sent": 0, "which": which}

    def broken(self: Any, *arguments: Any) -> None:
        private = self.comm
        real = private.comm
        if hook is not None:
            state["sent"] += 1
            if state["sent"] == which:
                hook()
        if rng is not None:
            private.comm = _Corrupting(real, state, rng)
        try:
            send(self, *arguments)
        finally:
            private.comm = real

    with mock.patch.object(MPITransport, "send", broken):
        yield
