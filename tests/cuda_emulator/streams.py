"""Streams and events of the emulated device: within ``checking``, operations must be ordered as on a GPU.

The emulator runs each operation at once, when it is enqueued. A GPU may run those of different streams in any order. So
an operation is an error here if another stream has used its memory last, unless an event, or the host, has waited for
that use. Two operations that only read need no order.

Each stream counts its operations, and knows up to which of each other stream's it waits; so does the host, which stands
for all threads. No stream waits for another one by itself, as those of PyTorch, which do not block.

Memory belongs to the stream on which it was allocated: when it is freed, that stream may get it again at once, as from
PyTorch's allocator. So another stream's use must be over for it, or be known by ``record``.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

Place = tuple[int, int]
"""Address and bytes of an array."""
Clock = dict["Stream", int]
"""How many operations of each stream are over."""


class EmulationError(RuntimeError):
    """A kernel accessed memory outside its arrays, had a data race, or waited for ever; or operations of two streams
    are not ordered."""


class Stream:
    """As ``cupy.cuda.Stream``; ``with stream:`` makes it the thread's current one.

    Attributes:
        point: operations so far.
        after: the operations of other streams that the next one waits for.
    """

    def __init__(self, name: str) -> None:
        if _memory is None and name != "null":
            raise EmulationError(f"the stream {name} was made outside of streams.checking, where nothing is checked")
        self.name = name
        self.point, self.after = 0, Clock()

    def __repr__(self) -> str:
        return f"stream {self.name}"

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        with _lock:
            _merge(self.after, event.clock)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def follows(self, event: Event) -> bool:
        """Whether the next operation waits for an event, by events alone and not because the host has waited."""
        return all(self is stream or self.after.get(stream, 0) >= point for stream, point in event.clock.items())

    def synchronize(self) -> None:
        """The host waits for all operations so far."""
        self.record_event().synchronize()

    def __enter__(self) -> Stream:
        _local.streams = [*getattr(_local, "streams", []), self]
        return self

    def __exit__(self, *_: Any) -> None:
        _local.streams = _local.streams[:-1]


class Event:
    """As ``cupy.cuda.Event``: a place in a stream.

    Attributes:
        clock: the operations before it; none if it was not recorded.
    """

    def __init__(self) -> None:
        self.clock = Clock()

    def record(self, stream: Stream | None = None) -> None:
        stream = current() if stream is None else stream
        with _lock:
            self.clock = {**stream.after, stream: stream.point}

    def synchronize(self) -> None:
        """The host waits for it."""
        with _lock:
            if _memory is not None:
                _merge(_memory.over, self.clock)


class _Use(NamedTuple):
    """An operation on the bytes from ``begin`` to ``end``: its stream, its number there, and its name."""

    stream: Stream
    point: int
    what: str
    begin: int
    end: int
    writing: bool


class _Allocation:
    """
    Attributes:
        stream: on which it was allocated; None: not known.
        uses: the last operations on its bytes.
        recorded: streams whose uses the allocator knows.
    """

    def __init__(self, begin: int, end: int, stream: Stream | None) -> None:
        self.begin, self.end, self.stream = begin, end, stream
        self.uses: list[_Use] = []
        self.recorded: set[Stream] = set()


class _Memory:
    """What is known of the device's memory.

    Attributes:
        over: the operations that the host has waited for.
        faults: errors of what was freed, where no exception can be raised.
    """

    def __init__(self) -> None:
        self.over = Clock()
        self.faults: list[str] = []
        self._begins: list[int] = []
        self._at: dict[int, _Allocation] = {}
        # A finalizer may run within any operation: what was freed is removed by the next one.
        self._freed: deque[_Allocation] = deque()

    def add(self, owner: Any, place: Place, stream: Stream | None) -> _Allocation:
        found = self.find(place[0])
        if found is not None:
            return found
        found = self._at[place[0]] = _Allocation(place[0], place[0] + place[1], stream)
        insort(self._begins, place[0])
        weakref.finalize(owner, self._free, found).atexit = False
        return found

    def find(self, address: int) -> _Allocation | None:
        while self._freed:
            gone = self._freed.popleft()
            del self._at[gone.begin]
            self._begins.remove(gone.begin)
        at = bisect_right(self._begins, address)
        found = self._at[self._begins[at - 1]] if at else None
        return found if found is not None and address < found.end else None

    def is_over(self, use: _Use, stream: Stream) -> bool:
        """Whether an operation that is enqueued now on this stream runs after a use."""
        return use.stream is stream or max(stream.after.get(use.stream, 0), self.over.get(use.stream, 0)) >= use.point

    def use(self, what: str, stream: Stream, place: Place, writing: bool) -> None:
        found = self.find(place[0]) if place[1] else None
        if found is None:
            return
        now = _Use(stream, stream.point, what, place[0], place[0] + place[1], writing)
        kept = [now]
        for last in found.uses:
            overlap = last.begin < now.end and now.begin < last.end
            if overlap and (writing or last.writing) and not self.is_over(last, stream):
                raise EmulationError(
                    f"{what} on {stream} {'writes' if writing else 'reads'} memory that {last.stream} "
                    f"{'has written' if last.writing else 'has read'} by {last.what}: it waits for no event of that "
                    "stream, and the host has not waited either"
                )
            within = now.begin <= last.begin and last.end <= now.end
            replaced = within and (writing or (last.stream is stream and not last.writing))
            if not replaced and self.over.get(last.stream, 0) < last.point:
                kept.append(last)
        found.uses = kept

    def _free(self, allocation: _Allocation) -> None:
        with _lock:
            self._freed.append(allocation)
            stream = allocation.stream
            if stream is None:
                return
            for use in allocation.uses:
                # The allocator waits for all that recorded streams have now, and so for what they wait for.
                if not any(self.is_over(use, one) for one in (stream, *allocation.recorded)):
                    self.faults.append(
                        f"memory of {stream} was freed while {use.stream} uses it by {use.what}: {stream} waits for no "
                        "event of that stream, and record_stream was not called"
                    )


_lock = threading.RLock()
_memory: _Memory | None = None
_local = threading.local()
NULL = Stream("null")
"""The current stream of each thread at first."""


def _merge(clock: Clock, other: Clock) -> None:
    for stream, point in other.items():
        clock[stream] = max(clock.get(stream, 0), point)


def current() -> Stream:
    """The thread's current stream."""
    streams = getattr(_local, "streams", None)
    return streams[-1] if streams else NULL


@contextmanager
def checking() -> Iterator[None]:
    """Within the context, streams can be made, and operations are checked.

    Raises:
        EmulationError: at its end, if memory was freed too early. Operations raise it by themselves.
    """
    global _memory
    if _memory is not None:
        raise EmulationError("streams.checking is entered twice")
    _memory = memory = _Memory()
    NULL.point, NULL.after = 0, Clock()
    try:
        yield
    finally:
        _memory = None
    if memory.faults:
        raise EmulationError("; ".join(memory.faults))


def active() -> bool:
    """Whether operations are checked."""
    return _memory is not None


def allocated(owner: Any, address: int, nbytes: int, stream: Stream | None) -> None:
    """Notes memory, unless it is known; None: it is not known on which stream it was allocated.

    Args:
        owner: the memory is freed when this object is.
    """
    if _memory is not None and nbytes:
        with _lock:
            _memory.add(owner, (address, nbytes), stream)


def known(address: int) -> bool:
    """Whether this is the device's memory, within ``checking``."""
    if _memory is None:
        return False
    with _lock:
        return _memory.find(address) is not None


def operation(what: str, reads: Iterable[Place], writes: Iterable[Place], stream: Stream | None = None) -> None:
    """Enqueues an operation.

    Args:
        what: for errors: the name of a kernel, for instance.
        stream: None: the current one.

    Raises:
        EmulationError: it is not ordered after the last operation of another stream on the same memory.
    """
    if _memory is None:
        return
    with _lock:
        stream = current() if stream is None else stream
        stream.point += 1
        for place in reads:
            _memory.use(what, stream, place, False)
        for place in writes:
            _memory.use(what, stream, place, True)


def record(address: int, stream: Stream) -> None:
    """As ``record_stream`` of a tensor: the allocator knows of this stream's uses of the memory at this address."""
    if _memory is not None:
        with _lock:
            found = _memory.find(address)
            if found is not None:
                found.recorded.add(stream)
