"""Gradients that are held as arrays until all of them are there, where the operations are functions of Python."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Any

import numpy as np

from hvd_deepreduce.codecs.interfaces import Floats
from hvd_deepreduce.engine.buckets import Bucket
from hvd_deepreduce.engine.graph.runtime import FULL, HELD, WANTED, Listener
from hvd_deepreduce.engine.graph.slots import AGAIN
from hvd_deepreduce.ops import arrays


class HeldUnit(ABC):
    """As ``Runtime``, but for dense runs. A subclass adds the operations, which call ``hold`` and ``total``.

    Args:
        listener: told what happens.
    """

    early = False

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._lock = Lock()
        self._waking = Lock()  # held while operations are woken: the first of a failed run ends it
        self._failure = ""
        self._came: set[int] = set()
        self.begin(0, 0)

    @abstractmethod
    def _wake(self, slots: Iterable[int]) -> None:
        """Lets the operations that take the sums of these slots call ``total``."""

    def _forget_woken(self) -> None:  # noqa: B027  (only where a word wakes an operation)
        """A run failed: of its operations, some may have been woken and have not gone on."""

    def begin(self, run: int, slots: int, force: bool = False) -> bool:
        with self._waking:
            with self._lock:
                if self._came and not force:
                    return False
                failed = force or bool(self._failure)
                self._run, self._slots, self._failure = run, slots, ""
                self._came.clear()
                self._held: dict[int, Floats] = {}
                self._sums: dict[int, tuple[Floats, float]] = {}
            if failed:
                self._forget_woken()
        return True

    def hold(self, at: int, run: int, gradient: Floats) -> None:
        """The gradient of slot ``at`` has come.

        Raises:
            RuntimeError: the run has failed, or is another one.
        """
        with self._lock:
            self._check(run)
            if at in self._came:
                raise RuntimeError(AGAIN)
            self._came.add(at)
            self._held[at] = gradient
            last = len(self._held) == self._slots
        if last:
            self._listener(HELD, -1, run, 0.0, False)

    def total(self, at: int, run: int, carrier: float) -> Floats:
        """The sum of slot ``at``, scaled as its carrier says, once it was woken.

        Raises:
            RuntimeError: as ``hold``.
        """
        with self._lock:
            self._check(run)
            total, divisor = self._sums.pop(at)
        arrays.scale(total, carrier / divisor)
        return total

    def _check(self, run: int) -> None:
        if self._failure or run != self._run:
            raise RuntimeError(self._failure or AGAIN)

    def sizes(self, slots: int) -> list[int]:
        return [self._held[at].size for at in range(slots)]

    def lay_out(self, places: np.ndarray[Any, np.dtype[np.int64]], buckets: Sequence[Bucket]) -> None:
        self._slots_of = [np.flatnonzero(places[0] == number).tolist() for number in range(len(buckets))]
        for number in range(len(buckets)):
            self._listener(FULL, number, self._run, 0.0, False)
            self._listener(WANTED, number, self._run, 0.0, False)  # ``total`` multiplies each sum by its carrier

    def fill(self, number: int, bucket: Bucket, as_pieces: bool) -> None:
        for at, parameter in zip(self._slots_of[number], bucket.members, strict=True):
            bucket.put(parameter, self._held.pop(at))

    def deliver(
        self, run: int, number: int, bucket: Bucket, divisor: float = 0.0, error: str | None = None
    ) -> None:
        slots = self._slots_of[number]
        with self._waking:
            with self._lock:
                if run != self._run:
                    return
                self._failure = error or self._failure
                for at, part in zip(slots, bucket.parts, strict=True):
                    self._sums[at] = bucket.gradient[slice(*part)].copy(), divisor
                    self._came.discard(at)
            self._wake(slots)

    def fail(self, error: str) -> None:
        with self._waking:
            with self._lock:
                self._failure = error
                came = list(self._came)
                self._came.clear()
            self._wake(came)
