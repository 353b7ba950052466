"""Counts what a job sends and the time that it takes, in total and for the last step.

Bytes are those on the wire, as ``exchange/traffic.py`` counts them, the same way for every exchange:

- a container in an allgather goes to all other ranks, and theirs come here;
- what Horovod allreduces (carriers, gradients that are not compressed, step checks) takes a ring;
- gradients that Horovod itself sends sparse (PyTorch's COO, TensorFlow's IndexedSlices) are two allgathers;
- the comparison of the ranks, and that at the start of an exchange over MPI, are allgathers;
- an exchange over MPI counts its own messages, and its step check and agreement as allreduces.

Not counted: the messages by which Horovod and MPI agree on what comes next, the headers of their protocols, and what an
elastic job broadcasts when ranks come or go.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from threading import Lock
from time import perf_counter
from types import TracebackType
from typing import Any, Literal

import numpy as np

from hvd_deepreduce.codecs.interfaces import Floats
from hvd_deepreduce.engine.timeline import Watch
from hvd_deepreduce.exchange.traffic import NOTHING, Traffic

_log = logging.getLogger("hvd_deepreduce")


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

    def to_dict(self) -> dict[str, Any]:
        """The attributes, and ``compression_ratio``: ``dense_bytes / bytes_sent``; 0 if nothing was sent."""
        return {**asdict(self), "compression_ratio": self.dense_bytes / self.bytes_sent if self.bytes_sent else 0.0}


Kind = Literal["encode", "wait", "decode"]
_SECONDS: dict[Kind, str] = {"encode": "encode_seconds", "wait": "wait_seconds", "decode": "decode_seconds"}
NOT_SENT = (
    "Nothing was sent so far. A job of one rank has nothing to exchange: start it on several, as in mpirun -np 2 or "
    "torchrun --nproc-per-node 2. In a job of several, the optimizer or the model does not use this object."
)


class Report(dict[str, dict[str, Any]]):
    """``{"total": {...}, "last_step": {...}}`` of plain numbers, with the keys of ``Counters.to_dict``. ``str`` is a
    table.

    Attributes:
        said: what was decided about compression with ``mode: auto``, and about the exchange with ``exchange: auto``,
            and why; and whether nothing was sent; else empty.
        residual_ratio: by parameter, the l2 norm of this rank's residual over that of its gradient, in the last step
            that ``measure_residuals`` has measured. Empty if there was none.
    """

    said = ""
    residual_ratio: Mapping[str, float] = {}

    def as_dict(self, prefix: str = "deepreduce") -> dict[str, float]:
        """All figures in one flat dict of finite numbers, for ``wandb.log`` or TensorBoard's ``add_scalar``:
        ``{"deepreduce/total/bytes_sent": ..., "deepreduce/residual_ratio/0.weight": ...}``."""
        flat = {f"{prefix}/{column}/{key}": value for column in self for key, value in self[column].items()}
        return flat | {f"{prefix}/residual_ratio/{name}": value for name, value in self.residual_ratio.items()}

    def __str__(self) -> str:
        columns = list(self)
        rows = [["", *(name.replace("_", " ") for name in columns)]]
        for key in self[columns[0]]:
            values = [self[column][key] for column in columns]
            if key == "compression_ratio" or (key.startswith("inside_") and not any(values)):
                continue
            shown = [f"{value:.4f}" if isinstance(value, float) else f"{value:,}" for value in values]
            rows.append([key.replace("_", " "), *shown])
        shares = [self[column]["bytes_sent"] / max(1, self[column]["dense_bytes"]) for column in columns]
        rows.append(["sent / dense", *(f"{share:.2%}" for share in shares)])
        rows.append(["compression ratio", *(f"{self[column]['compression_ratio']:,.1f}" for column in columns)])
        if any(self[column]["inside_bytes_sent"] for column in columns):
            left = [self[column]["bytes_sent"] - self[column]["inside_bytes_sent"] for column in columns]
            shares = [sent / max(1, self[column]["dense_bytes"]) for sent, column in zip(left, columns, strict=True)]
            rows.append(["sent to other nodes / dense", *(f"{share:.2%}" for share in shares)])
        first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
        lines = [
            "  ".join([row[0].ljust(first), *(cell.rjust(wide) for cell, wide in zip(row[1:], others, strict=True))])
            for row in rows
        ]
        if ratios := self.residual_ratio:
            name = max(ratios, key=lambda one: ratios[one])
            lines.append(f"residual / gradient: median {median(ratios.values()):.1f}, most {ratios[name]:.1f} ({name})")
        return "\n".join([*lines, self.said] if self.said else lines)


Callback = Callable[[Report], object]


class Wishes:
    """What the user asked to be told of the steps.

    Attributes:
        callbacks: functions, each with how many steps there are from one call to the next.
        measure_every: residuals are measured in each step of this number; 0: never.
    """

    def __init__(self) -> None:
        self.callbacks: list[tuple[Callback, int]] = []
        self.measure_every = self._steps = 0

    def measure(self, every: int) -> None:
        """Residuals are measured in the next step, and then in each ``every``-th; 0: not any more."""
        self.measure_every, self._steps = every, 0

    def measures(self) -> bool:
        """A step begins: whether residuals are measured in it."""
        if not self.measure_every:
            return False
        self._steps += 1
        return (self._steps - 1) % self.measure_every == 0

    def tell(self, stats: Stats) -> None:
        """A step has ended: calls the functions that are due. What a function raises must not end the step on this rank
        alone: it is logged, and the function is not called again."""
        for one in list(self.callbacks):
            function, every = one
            if stats.total.steps % every == 0:
                try:
                    function(stats.to_dict())
                except Exception:
                    _log.exception(
                        "the callback %r raised an error after step %d: the job goes on, and the callback is not "
                        "called again", function, stats.total.steps,
                    )  # fmt: skip
                    self.callbacks.remove(one)


def _norm(values: Floats) -> float:
    """The l2 norm, also of values whose squares are beyond their dtype."""
    return float(np.linalg.norm(values.astype(np.float64, copy=False)))


@dataclass
class Stats:
    """Counters since the start, and of the step that is under way or was the last. Threads may share it.

    Attributes:
        watch: is told of each span; None: nobody watches.
        wishes: what the user asked for.
        measuring: whether residuals are measured in this step.
        idle: whether no step is under way.
        residual_ratio: as in ``Report``.
    """

    total: Counters = field(default_factory=Counters)
    last: Counters = field(default_factory=Counters)
    watch: Watch | None = None
    wishes: Wishes = field(default_factory=Wishes)
    measuring: bool = False
    residual_ratio: dict[str, float] = field(default_factory=dict)
    idle: bool = True
    _lock: Lock = field(default_factory=Lock)

    def begin_step(self) -> None:
        """Counts a new step, unless one is under way."""
        if self.idle:
            with self._lock:
                if self.idle:
                    self.idle = False
                    self.last = Counters(steps=1)
                    self.total.steps += 1
                    self.measuring = bool(self.wishes.measure_every) and self.wishes.measures()

    def end_step(self) -> None:
        """All results of the step are there; the next ``begin_step`` counts."""
        with self._lock:
            idle, self.idle = self.idle, True
        if not idle and self.wishes.callbacks:
            self.wishes.tell(self)

    def measure(self, name: str, residual: Floats | None, gradient: Floats) -> None:
        """Notes the norm of a parameter's residual over that of its gradient, both on the host, if it is finite.

        Args:
            residual: what earlier steps have left; None: nothing.
        """
        norm = _norm(gradient)
        ratio = _norm(residual) / norm if residual is not None and norm else 0.0
        if norm and math.isfinite(norm) and math.isfinite(ratio):
            self.residual_ratio[name] = ratio

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

    def __post_init__(self) -> None:
        # ``with stats.span("encode", bucket.name):`` counts the seconds within, and tells who watches.
        self.span = partial(Span, self)

    def to_dict(self) -> Report:
        """A copy of the counters."""
        with self._lock:
            report = Report(total=self.total.to_dict(), last_step=self.last.to_dict())
            report.residual_ratio = dict(self.residual_ratio)
            report.said = "" if self.total.bytes_sent else NOT_SENT
        return report


class Span:
    """Seconds of one kind of work on one bucket, between the beginning and the end of a ``with`` block.

    Args:
        before: seconds that the same kind of work has taken before; counted too.

    Attributes:
        kind: of the work; it may be known only at the end.
        counted: whether the counters take them.
        wire: bytes to be counted with them.
    """

    __slots__ = ("_before", "_begin", "_bucket", "_stats", "counted", "kind", "wire")

    def __init__(self, stats: Stats, kind: Kind, bucket: str, before: float = 0.0) -> None:
        self._stats, self.kind, self._bucket, self._before = stats, kind, bucket, before
        self.counted, self.wire = True, NOTHING

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
            key, counted, wire = _SECONDS[self.kind], seconds + self._before, self.wire
            with stats._lock:
                for counters in (stats.total, stats.last):
                    vars(counters)[key] += counted
                    counters.bytes_sent += wire.sent
                    counters.bytes_received += wire.received
        if watch is not None:
            watch.pop()
            watch.add(self.kind, self._bucket, self._begin, end)
