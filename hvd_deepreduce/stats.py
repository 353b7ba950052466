"""What a job sent and how long it took, in all and in the last step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from threading import Lock
from typing import Any


@dataclass
class Counters:
    """Attributes:
    steps: optimizer steps.
    bytes_sent: what this rank handed to the exchange: containers, carriers, and tensors that went uncompressed.
    dense_bytes: what it would have handed over without compression.
    encode_seconds: accumulating, selecting, encoding.
    wait_seconds: waiting for the other ranks' containers, after the backward pass.
    decode_seconds: decoding and summing.

    Where a framework encodes or decodes several tensors at a time, their seconds are added up.
    """

    steps: int = 0
    bytes_sent: int = 0
    dense_bytes: int = 0
    encode_seconds: float = 0.0
    wait_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclass
class Stats:
    """Counters since the start, and of the step that is under way or came last. Threads may share it."""

    total: Counters = field(default_factory=Counters)
    last: Counters = field(default_factory=Counters)
    _ended: bool = True
    _lock: Lock = field(default_factory=Lock)

    def step_began(self) -> None:
        """A tensor has come; after ``step_ended`` it is the first of a new step."""
        with self._lock:
            if self._ended:
                self._ended = False
                self.last = Counters(steps=1)
                self.total.steps += 1

    def sending(self, sent: int, dense: int) -> None:
        """A tensor is handed to the exchange."""
        with self._lock:
            for counters in (self.total, self.last):
                counters.bytes_sent += sent
                counters.dense_bytes += dense

    def step_ended(self) -> None:
        """All tensors of the step have come back."""
        self._ended = True

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Adds the seconds of its body to ``<what>_seconds``."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.took(what, time.perf_counter() - begin)

    def took(self, what: str, seconds: float) -> None:
        """Adds to ``<what>_seconds``."""
        with self._lock:
            for counters in (self.total, self.last):
                setattr(counters, f"{what}_seconds", getattr(counters, f"{what}_seconds") + seconds)

    def to_dict(self) -> dict[str, Any]:
        """``{"total": {...}, "last_step": {...}}`` of plain numbers."""
        return {"total": asdict(self.total), "last_step": asdict(self.last)}
