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
from time import perf_counter
from types import TracebackType
from typing import Any, Literal

from hvd_deepreduce.engine.timeline import Watch
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
        inside_bytes_sent, inside_bytes_received: of these, what ``hierarchical`` sends to ranks of this node, and what
            comes from them.
        dense_bytes: bytes that this rank would send without compression, if Horovod reduced all gradients dense by a
            ring: ``2 (n - 1) / n`` times their size on n ranks. It would receive as many.
        encode_seconds: accumulating, selecting and encoding.
        wait_seconds: waiting for the other ranks' containers, after the backward pass.
        decode_seconds: decoding and summing.
    """

    steps: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    inside_bytes_sent: int = 0
    inside_bytes_received: int = 0
    dense_bytes: int = 0
    encode_seconds: float = 0.0
    wait_seconds: float = 0.0
    decode_seconds: float = 0.0


Kind = Literal["encode", "wait", "decode"]


class Report(dict[str, dict[str, Any]]):
    """``{"total": {...}, "last_step": {...}}`` of plain numbers, with the keys of ``Counters``. ``str`` is a table.

    Attributes:
        said: what was decided about compression with ``mode: auto``, and about the exchange with ``exchange: auto``,
            and why; else empty.
    """

    said = ""

    def __str__(self) -> str:
        columns = list(self)
        rows = [["", *(name.replace("_", " ") for name in columns)]]
        for key in self[columns[0]]:
            values = [self[column][key] for column in columns]
            if key.startswith("inside_") and not any(values):
                continue
            shown = [f"{value:.4f}" if isinstance(value, float) else f"{value:,}" for value in values]
            rows.append([key.replace("_", " "), *shown])
        shares = [self[column]["bytes_sent"] / max(1, self[column]["dense_bytes"]) for column in columns]
        rows.append(["sent / dense", *(f"{share:.2%}" for share in shares)])
        if any(self[column]["inside_bytes_sent"] for column in columns):
            left = [self[column]["bytes_sent"] - self[column]["inside_bytes_sent"] for column in columns]
            shares = [sent / max(1, self[column]["dense_bytes"]) for sent, column in zip(left, columns, strict=True)]
            rows.append(["sent to other nodes / dense", *(f"{share:.2%}" for share in shares)])
        first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
        lines = [
            "  ".join([row[0].ljust(first), *(cell.rjust(wide) for cell, wide in zip(row[1:], others, strict=True))])
            for row in rows
        ]
        return "\n".join([*lines, self.said] if self.said else lines)


@dataclass
class Stats:
    """Counters since the start, and of the step that is under way or was the last. Threads may share it.

    Attributes:
        watch: is told of each span; None: nobody watches.
    """

    total: Counters = field(default_factory=Counters)
    last: Counters = field(default_factory=Counters)
    watch: Watch | None = None
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
        self, *, wire: Traffic = NOTHING, dense: int = 0, encode: float = 0.0, wait: float = 0.0, decode: float = 0.0,
        inside: Traffic = NOTHING,
    ) -> None:  # fmt: skip
        """Adds bytes (on the wire, of these inside the node, and dense) and seconds (encode, wait, decode)."""
        with self._lock:
            for counters in (self.total, self.last):
                counters.bytes_sent += wire.sent
                counters.bytes_received += wire.received
                counters.inside_bytes_sent += inside.sent
                counters.inside_bytes_received += inside.received
                counters.dense_bytes += dense
                counters.encode_seconds += encode
                counters.wait_seconds += wait
                counters.decode_seconds += decode

    def span(self, kind: Kind, bucket: str) -> Span:
        """``with stats.span("encode", bucket.name):`` counts the seconds within, and tells who watches."""
        return Span(self, kind, bucket)

    def to_dict(self) -> Report:
        """A copy of the counters."""
        with self._lock:
            return Report(total=asdict(self.total), last_step=asdict(self.last))


class Span:
    """Seconds of one kind of work on one bucket, between the beginning and the end of a ``with`` block.

    Attributes:
        kind: of the work; it may be known only at the end.
        counted: whether the counters take them.
    """

    __slots__ = ("_begin", "_bucket", "_stats", "counted", "kind")

    def __init__(self, stats: Stats, kind: Kind, bucket: str) -> None:
        self._stats, self.kind, self._bucket = stats, kind, bucket
        self.counted = True

    def __enter__(self) -> Span:
        watch = self._stats.watch
        if watch is not None:
            watch.push(self.kind, self._bucket)
        self._begin = perf_counter()
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        end, stats = perf_counter(), self._stats
        watch, seconds = stats.watch, end - self._begin
        if self.counted and error is None:
            if self.kind == "encode":
                stats.add(encode=seconds)
            elif self.kind == "wait":
                stats.add(wait=seconds)
            else:
                stats.add(decode=seconds)
        if watch is not None:
            watch.pop()
            watch.add(self.kind, self._bucket, self._begin, end)
