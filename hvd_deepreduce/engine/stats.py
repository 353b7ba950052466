"""Counts what a job sends and the time that it takes, in total and for the last step.

Bytes are those on the wire, as ``exchange/traffic.py`` counts them, the same way for every exchange:

- a container in an allgather goes to all other ranks, and theirs come here;
- what Horovod allreduces (carriers, gradients that are not compressed, meetings) takes a ring;
- gradients that Horovod itself sends sparse (PyTorch's COO, TensorFlow's IndexedSlices) are two allgathers;
- the comparison of the ranks, and that at the start of an exchange over MPI, are allgathers;
- an exchange over MPI counts its own messages, and its meeting and agreement as allreduces.

Not counted: the messages by which Horovod and MPI agree on what comes next, the headers of their protocols, and what an
elastic job broadcasts when ranks come or go.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from threading import Lock
from typing import Any

from hvd_deepreduce.exchange.traffic import NOTHING, Traffic


@dataclass
class Counters:
    """Bytes and seconds of one rank.

    Where a framework encodes or decodes several tensors at the same time, their seconds are added up.

    Attributes:
        steps: optimizer steps.
        bytes_sent: bytes that this rank sends to others: containers, carriers, gradients that are not compressed, and
            the messages that compare the ranks.
        bytes_received: bytes that come from others.
        dense_bytes: bytes that this rank would send without compression, if Horovod reduced all gradients dense by a
            ring: ``2 (n - 1) / n`` times their size on n ranks. It would receive as many.
        encode_seconds: accumulating, selecting and encoding.
        wait_seconds: waiting for the other ranks' containers, after the backward pass.
        decode_seconds: decoding and summing.
    """

    steps: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    dense_bytes: int = 0
    encode_seconds: float = 0.0
    wait_seconds: float = 0.0
    decode_seconds: float = 0.0


class Report(dict[str, dict[str, Any]]):
    """``{"total": {...}, "last_step": {...}}`` of plain numbers, with the keys of ``Counters``. ``str`` is a table.

    Attributes:
        said: what was decided about compression, and why, with ``mode: auto``; else empty.
    """

    said = ""

    def __str__(self) -> str:
        columns = list(self)
        rows = [["", *(name.replace("_", " ") for name in columns)]]
        for key in self[columns[0]]:
            values = [self[column][key] for column in columns]
            shown = [f"{value:.4f}" if isinstance(value, float) else f"{value:,}" for value in values]
            rows.append([key.replace("_", " "), *shown])
        shares = [self[column]["bytes_sent"] / max(1, self[column]["dense_bytes"]) for column in columns]
        rows.append(["sent / dense", *(f"{share:.2%}" for share in shares)])
        first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
        lines = [
            "  ".join([row[0].ljust(first), *(cell.rjust(wide) for cell, wide in zip(row[1:], others, strict=True))])
            for row in rows
        ]
        return "\n".join([*lines, self.said] if self.said else lines)


@dataclass
class Stats:
    """Counters since the start, and of the step that is under way or was the last. Threads may share it."""

    total: Counters = field(default_factory=Counters)
    last: Counters = field(default_factory=Counters)
    _ended: bool = True
    _lock: Lock = field(default_factory=Lock)

    @property
    def idle(self) -> bool:
        """Whether no step is under way."""
        return self._ended

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
        self, *, wire: Traffic = NOTHING, dense: int = 0, encode: float = 0.0, wait: float = 0.0, decode: float = 0.0
    ) -> None:
        """Adds bytes (on the wire, and dense) and seconds (encode, wait, decode)."""
        with self._lock:
            for counters in (self.total, self.last):
                counters.bytes_sent += wire.sent
                counters.bytes_received += wire.received
                counters.dense_bytes += dense
                counters.encode_seconds += encode
                counters.wait_seconds += wait
                counters.decode_seconds += decode

    def to_dict(self) -> Report:
        """A copy of the counters."""
        with self._lock:
            return Report(total=asdict(self.total), last_step=asdict(self.last))
