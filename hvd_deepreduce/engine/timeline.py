"""The encode, wait and decode spans of a job, as a Chrome trace of each rank and as NVTX ranges.

A trace is written where the environment names a path: ``HVD_DEEPREDUCE_TIMELINE``, or ``HOROVOD_TIMELINE``, beside
Horovod's own trace then. Rank r writes ``<path>.deepreduce.<r>.json``. Times are microseconds since this module was
imported; as in Horovod's file, the first line has the moment from which they count, in microseconds since 1970, so that
``merge`` can put files on one clock. Ranges are pushed with ``HVD_DEEPREDUCE_NVTX=1``, or under ``nsys profile``.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from time import perf_counter, time
from typing import Any

from hvd_deepreduce.ops import device
from hvd_deepreduce.wire.quoting import quoted

_log = logging.getLogger("hvd_deepreduce")
PATH, HOROVOD_PATH, NVTX = "HVD_DEEPREDUCE_TIMELINE", "HOROVOD_TIMELINE", "HVD_DEEPREDUCE_NVTX"
NSYS = "NSYS_PROFILING_SESSION_ID"
"""Set in what ``nsys profile`` starts."""
FIRST_PROCESS = 1 << 20
"""The trace's process number of rank 0. Horovod's are the numbers of tensors."""
SEPARATOR = re.compile(r"[\s,]*")
START = "start_time_since_epoch_in_micros"
"""Horovod's name for the moment from which a file's times count."""
BEGUN, EPOCH = perf_counter(), round(time() * 1e6)
"""The moment from which times count: seconds of ``perf_counter``, and microseconds since 1970."""
MOST_WAITING, MOST_SECONDS = 256, 1.0
"""Events are written when so many wait, or when the oldest has waited so long."""


class Trace:
    """A file of spans in Chrome's trace event format (its JSON array, of which the closing bracket may be missing).

    It is only ever appended to, by whole events, so that what is left of a job that was killed can be opened. What
    cannot be written is dropped, with a warning: a trace must not end a job. Threads may share it.

    Args:
        path: of the file; one from an earlier job is replaced.
        rank: of this process.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.path = path
        self._process = FIRST_PROCESS + rank
        self._lock = threading.Lock()
        self._threads: set[int] = set()
        self._written, self._ended = perf_counter(), False
        # Not truncated: after an elastic job's ranks have changed, another process may still write to the old file.
        path.unlink(missing_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        name = f"hvd_deepreduce, rank {rank} ({socket.gethostname()})"
        first = {"name": "process_name", "ph": "M", "pid": self._process, "args": {"name": name, START: EPOCH}}
        os.write(self._file, b"[\n" + json.dumps(first).encode())
        self._waiting: list[dict[str, Any]] = []

    def add(self, kind: str, bucket: str, begin: float, end: float) -> None:
        """Adds a span of this thread.

        Args:
            kind: ``"encode"``, ``"wait"`` or ``"decode"``.
            bucket: the name of the bucket or parameter.
            begin, end: seconds of ``perf_counter``.
        """
        thread = threading.get_ident()
        span = {
            "name": kind, "ph": "X", "pid": self._process, "tid": thread, "ts": round(1e6 * (begin - BEGUN), 1),
            "dur": round(1e6 * (end - begin), 1), "args": {"bucket": bucket},
        }  # fmt: skip
        with self._lock:
            if thread not in self._threads:
                self._threads.add(thread)
                said = {"name": threading.current_thread().name}
                self._waiting.append(
                    {"name": "thread_name", "ph": "M", "pid": self._process, "tid": thread, "args": said}
                )
            self._waiting.append(span)
            if len(self._waiting) >= MOST_WAITING or end - self._written > MOST_SECONDS:
                self._write()

    def flush(self) -> None:
        """Writes what waits."""
        with self._lock:
            self._write()

    def end(self) -> None:
        """Writes what waits and the closing bracket; what is added later is dropped."""
        with self._lock:
            if not self._ended:
                self._write(last=b"\n]\n")
                self._ended = True
                os.close(self._file)

    def _write(self, last: bytes = b"") -> None:
        """In one call of the system, so that no event is left half written where the job is killed."""
        lines = b"".join(b",\n" + json.dumps(one).encode() for one in self._waiting) + last
        self._waiting.clear()
        self._written = perf_counter()
        if self._ended or not lines:
            return
        try:
            os.write(self._file, lines)
        except OSError as error:
            self._ended = True
            _log.warning("hvd_deepreduce writes no more spans to %s: %s", self.path, error.strerror)


class Watch:
    """What is told of a rank's spans: its trace, and NVTX ranges.

    Args:
        path: that the trace's name begins with; empty: no trace.
        rank: returns this process's rank; called at the first span.
        nvtx: CuPy's module, or None.
    """

    def __init__(self, path: str, rank: Callable[[], int], nvtx: Any = None) -> None:
        self._path, self._rank, self._nvtx = path, rank, nvtx
        self._trace: Trace | None = None

    def push(self, kind: str, bucket: str) -> None:
        """A span begins on this thread."""
        if self._nvtx is not None:
            self._nvtx.RangePush(f"deepreduce {kind} {bucket}")

    def pop(self) -> None:
        """The thread's last span ends."""
        if self._nvtx is not None:
            self._nvtx.RangePop()

    def add(self, kind: str, bucket: str, begin: float, end: float) -> None:
        """A span is over; as ``Trace.add``."""
        if self._trace is None and self._path:
            self._trace = _trace(self._path, self._rank())
            if self._trace is None:
                self._path = ""
        if self._trace is not None:
            self._trace.add(kind, bucket, begin, end)

    def flush(self) -> None:
        """Writes what waits to the trace."""
        if self._trace is not None:
            self._trace.flush()


_traces: dict[str, Trace | None] = {}
_opening = threading.Lock()


def _trace(path: str, rank: int) -> Trace | None:
    """The process's one trace at this path, which is ended with the process; None: it cannot be written."""
    with _opening:
        if path not in _traces:
            try:
                trace = _traces[path] = Trace(Path(f"{path}.deepreduce.{rank}.json"), rank)
                atexit.register(trace.end)
            except OSError as error:
                _traces[path] = None
                _log.warning("hvd_deepreduce writes no timeline: %s: %s", error.filename, error.strerror)
        return _traces[path]


def watch(rank: Callable[[], int]) -> Watch | None:
    """What the environment asks for; None: nothing.

    ``HOROVOD_TIMELINE=DYNAMIC`` names no file: the job starts Horovod's timeline by a call.
    """
    path = os.environ.get(PATH) or os.environ.get(HOROVOD_PATH, "")
    if path == "DYNAMIC":
        path = ""
    nvtx = None
    asked = os.environ.get(NVTX, "")
    if asked not in ("", "0") or (asked == "" and NSYS in os.environ):
        try:
            nvtx = device.array_module(None).cuda.nvtx
        except ImportError as error:
            if asked:
                _log.warning("hvd_deepreduce pushes no NVTX ranges, which %s asks for: %s", NVTX, error)
    return Watch(path, rank, nvtx) if path or nvtx is not None else None


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a trace; of one whose end is missing, those that are whole.

    Raises:
        ValueError: it is not a trace in Chrome's array form.
        OSError: it cannot be read.
    """
    text, decoder = path.read_text("utf-8", "replace"), json.JSONDecoder()
    events: list[dict[str, Any]] = []
    at = SEPARATOR.match(text).end()  # type: ignore[union-attr]
    if text[at : at + 1] != "[":
        raise ValueError(f"{path} is not a timeline of Horovod or hvd_deepreduce: these are JSON arrays of events")
    at += 1
    while True:
        at = SEPARATOR.match(text, at).end()  # type: ignore[union-attr]
        try:
            event, at = decoder.raw_decode(text, at)
        except ValueError:  # the closing bracket, or the end
            return events
        except RecursionError:
            raise ValueError(f"{path} is not a timeline of Horovod or hvd_deepreduce: it is nested too deep") from None
        if not isinstance(event, dict):
            raise ValueError(f"{path} is not a timeline of Horovod or hvd_deepreduce: one event is {quoted(event)}")
        events.append(event)


def merge(traces: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The events of several files, with times since the first of their beginnings.

    Raises:
        ValueError: a file does not say when it was begun, or a time is no number.
    """
    traces = list(traces)
    starts = []
    for events in traces:
        told = [event["args"] for event in events if isinstance(event.get("args"), dict)]
        known = [args[START] for args in told if START in args]
        if not known:
            raise ValueError(f"a timeline has no {START}, by which timelines are put on one clock")
        for moment in (known[0], *(event["ts"] for event in events if "ts" in event)):
            if not isinstance(moment, int | float) or not abs(moment) < 1e18:
                raise ValueError(f"a timeline has the time {quoted(moment)}; a number of microseconds is needed")
        starts.append(known[0])
    merged = []
    for events, start in zip(traces, starts, strict=True):
        for event in events:
            merged.append({**event, "ts": event["ts"] + start - min(starts)} if "ts" in event else event)
    return merged
