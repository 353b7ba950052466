"""Counts what a job sends and the time that it takes, in total and for the last step."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from threading import Lock
from typing import Any


@dataclass
class Counters:
    """Bytes and seconds of one rank.

    Where a framework encodes or decodes several tensors at the same time, their seconds are added up.

    Attributes:
        steps: optimizer steps.
        bytes_sent: bytes handed to the exchange: containers, carriers, and tensors that are not compressed.
        dense_bytes: bytes that would be exchanged without compression.
        encode_seconds: accumulating, selecting and encoding.
        wait_seconds: waiting for the other ranks' containers, after the backward pass.
        decode_seconds: decoding and summing.
    """

    steps: int = 0
    bytes_sent: int = 0
    dense_bytes: int = 0
    encode_seconds: float = 0.0
    wait_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclass
class Stats:
    """Counters since the start, and of the step that is under way or was the last. Threads may share it."""

    total: Counters = field(default_factory=Counters)
    last: Counters = field(default_factory=Counters)
    _ended: bool = True
    _lock: Lock = field(default_factory=Lock)

    def begin_step(self) -> None:
        """Counts a new step, unless one is under way."""
        if self._ended:
            with self._lock:
                if self._ended:
                    self._ended = False
                    self.last = Counters(steps=1)
                    self.total.steps += 1

    def end_step(self) -> None:
        """All results of the step are there; the next ``begin_step`` counts."""
        self._ended = True

    def add(
        self, *, sent: int = 0, dense: int = 0, encode: float = 0.0, wait: float = 0.0, decode: float = 0.0
    ) -> None:
        """Adds bytes (sent, dense) and seconds (encode, wait, decode)."""
        with self._lock:
            for counters in (self.total, self.last):
                counters.bytes_sent += sent
                counters.dense_bytes += dense
                counters.encode_seconds += encode
                counters.wait_seconds += wait
                counters.decode_seconds += decode

    def to_dict(self) -> dict[str, Any]:
        """``{"total": {...}, "last_step": {...}}`` of plain numbers."""
        with self._lock:
            return {"total": asdict(self.total), "last_step": asdict(self.last)}
