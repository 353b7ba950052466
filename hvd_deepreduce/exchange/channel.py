"""What the sparse allreduces share: a private communicator, a scheduler of messages, and agreement about failures.

An algorithm is written as a program: a generator that sends with ``traffic.send``, and yields ``(source, tag, count)``
where it needs a message of that many streams, which it is handed when they have come. A rank runs several programs at
once, one for each slice of the vector, so that one slice is merged while others travel. The same programs run in
``simulation``, without MPI.
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from mpi4py import MPI

from hvd_deepreduce.codec import U8, Floats
from hvd_deepreduce.joint.densestream import DTYPE_IDS, Stream, size_of
from hvd_deepreduce.sparse import SparseTensor

Wants = tuple[int, int, int]
Program = Generator[Wants, list[U8], None]
R = TypeVar("R")
SLOTS = 64
"""Programs a rank, at most; the tag of a message is phase * SLOTS + slot."""
TIMEOUT = 600.0
"""Seconds without any message after which a rank counts as lost."""
TEXT = 400
"""Bytes of a failure's sentence that the other ranks see."""
YIELDS = 1
LONGEST_SLEEP = 500e-6
"""How a rank waits: one more poll at once, then with sleeps that double, for its core may be needed."""
RECEIVES = 2
"""Messages of one sender that are received at a time: earlier slices come whole before later ones begin."""
EMPTY = np.empty(0, np.uint8)


class ExchangeError(ValueError):
    """Input or messages that cannot be summed; raised on all ranks alike, and names the ranks where it was found."""


class LostRankError(RuntimeError):
    """A rank that died, or from which nothing came in the time allowed. The communicator cannot be used again."""


class Traffic(Protocol):
    """What a program sees of the network."""

    rank: int
    size: int
    failure: str | None

    def send(self, to: int, tag: int, parts: list[U8]) -> None:
        """Starts a message of the parts, one behind the other; an empty one where this rank has failed."""

    def attempt(self, default: R, work: Callable[..., R], *arguments: Any) -> R:
        """``work(*arguments)``; ``default`` once this rank has failed, which a ``ValueError`` in here makes it.

        A rank that has failed sends and receives on, so that no other waits for it; all learn of it at the end."""


def attempt(traffic: Traffic, default: R, work: Callable[..., R], *arguments: Any) -> R:
    """The body of ``Traffic.attempt``."""
    if traffic.failure is None:
        try:
            return work(*arguments)
        except (ValueError, MemoryError) as error:
            traffic.failure = str(error) or type(error).__name__
    return default


@dataclass(frozen=True)
class Step:
    """One round of recursive halving, for one rank: the ranks ``low`` to ``high`` part at ``middle``.

    Attributes:
        mine, other: this rank's part of them, and the other.
        sends: whom this rank sends what it has of the other part's regions.
        receives: who sends this rank theirs of its own part's.
    """

    middle: int
    mine: range
    other: range
    sends: list[int]
    receives: list[int]


def halving(rank: int, size: int) -> list[Step]:
    """The rounds of recursive halving for any number of ranks; backwards they are those of recursive doubling.

    The left part gets the odd rank. Rank i of a part is partner of rank i of the other; the left part's odd one has
    none: it sends to the last of the right part, and has nothing to receive, for the others of its part get it all."""
    steps = []
    low, high = 0, size
    while high - low > 1:
        middle = low + (high - low + 1) // 2
        left, right = range(low, middle), range(middle, high)
        if rank < middle:
            i = rank - low
            paired = i < len(right)
            partner = right[min(i, len(right) - 1)]
            steps.append(Step(middle, left, right, [partner], [partner] if paired else []))
            high = middle
        else:
            partner = left[rank - middle]
            odd = [left[-1]] if rank == high - 1 and len(left) > len(right) else []
            steps.append(Step(middle, right, left, [partner], [partner, *odd]))
            low = middle
    return steps


def parts_of(message: U8, count: int, sender: int) -> list[U8]:
    """The ``count`` streams that a message is made of."""
    parts = []
    try:
        for _ in range(count):
            size = size_of(message)
            parts.append(message[:size])
            message = message[size:]
        if message.size:
            raise ValueError(f"{message.size} bytes stand behind its {count} streams")
    except ValueError as error:
        raise ValueError(f"a message of rank {sender} cannot be read: {error}") from None
    return parts


def gather(traffic: Traffic, tag: int, section: U8, deliver: Callable[[int, U8], None]) -> Program:
    """Allgather by recursive doubling: ``deliver(rank, section)`` for every rank's section, in the order they come."""
    sections = {traffic.rank: section}
    traffic.attempt(None, deliver, traffic.rank, section)
    for step in reversed(halving(traffic.rank, traffic.size)):
        for to in step.receives:
            traffic.send(to, tag, [sections[rank] for rank in step.mine])
        for source in step.sends:
            parts = yield source, tag, len(step.other)
            for rank, part in zip(step.other, parts, strict=True):
                sections[rank] = part
                traffic.attempt(None, deliver, rank, part)


class Total:
    """Where the regions of a sum, times ``scale``, are put together: one dense array, or a sparse tensor's streams."""

    def __init__(self, numel: int, dtype: np.dtype[Any], dense: bool, out: Floats | None, scale: float = 1.0) -> None:
        self.scale = scale
        self.numel, self.dtype = numel, dtype
        self.out = np.empty(numel, dtype) if dense and out is None else out
        self.parts: list[tuple[int, Stream]] = []

    def put(self, stream: Stream, begin: int, end: int) -> None:
        """The elements from ``begin`` to ``end``; once for each region of the vector."""
        if self.scale != 1:
            stream = Stream(self.numel, stream.starts, stream.lengths, stream.values * self.dtype.type(self.scale))
        if self.out is not None:
            stream.dense(begin, self.out[begin:end])
        elif stream.starts.size:
            self.parts.append((begin, stream))

    def value(self) -> SparseTensor | Floats:
        """The sum."""
        if self.out is not None:
            return self.out
        if not self.parts:
            return SparseTensor(self.numel, np.empty(0, np.uint32), np.empty(0, self.dtype))
        return Stream.join([stream for _, stream in sorted(self.parts, key=lambda part: part[0])]).sparse()


class Patience:
    """Waiting between polls: first by giving up the core, soon by sleeping; an error once nothing came for too long."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.progress()

    def progress(self) -> None:
        """Something came."""
        self.idle = 0
        self.deadline = time.monotonic() + self.seconds

    def wait(self, whom: str) -> None:
        """Nothing came; ``whom`` this rank waits for."""
        self.idle += 1
        if self.idle <= YIELDS:
            os.sched_yield()
            return
        time.sleep(min(LONGEST_SLEEP, 25e-6 * 2 ** min(self.idle - YIELDS, 16)))
        if time.monotonic() > self.deadline:
            raise LostRankError(f"nothing came from {whom} for {self.seconds:g} s")


class Channel:
    """A duplicate of a communicator, for the exchanges alone; one for each communicator, kept as its attribute."""

    _keyval: int | None = None

    def __init__(self, comm: MPI.Comm, timeout: float) -> None:
        self.lock = threading.Lock()
        self.abandoned: object = None
        self.sent = 0  # bytes, of all allreduces so far
        self.timeout = timeout
        self.comm, request = comm.Idup()
        self.wait(request)
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank, self.size = self.comm.rank, self.comm.size

    @classmethod
    def of(cls, comm: MPI.Comm, timeout: float) -> Channel:
        """The communicator's channel; the first call for a communicator is collective."""
        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            raise TypeError(f"a sparse allreduce needs an mpi4py intracommunicator, and {comm!r} was given")
        if cls._keyval is None:
            cls._keyval = MPI.Comm.Create_keyval(delete_fn=_free)
        channel: Any = comm.Get_attr(cls._keyval)
        if channel is None:
            channel = cls(comm, timeout)
            comm.Set_attr(cls._keyval, channel)
        assert isinstance(channel, Channel)
        channel.timeout = timeout
        return channel

    def wait(self, request: MPI.Request) -> None:
        """Waits for a collective operation, but not for ever."""
        patience = Patience(self.timeout)
        try:
            while not request.Test():
                patience.wait("one of the other ranks, all of which must call this,")
        except (LostRankError, MPI.Exception) as error:
            self.abandoned = request
            raise LostRankError(f"a rank is lost: {error}") from None

    def reduce(self, values: np.ndarray[Any, np.dtype[np.uint64]], op: MPI.Op) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """The allreduce of a few numbers."""
        out = np.empty_like(values)
        self.wait(self.comm.Iallreduce(values, out, op))
        return out

    def gather_texts(self, text: str) -> list[str]:
        """Every rank's text, cut at ``TEXT`` bytes."""
        own = np.frombuffer(text.encode()[:TEXT].ljust(TEXT, b"\0"), np.uint8).copy()
        texts = np.empty((self.size, TEXT), np.uint8)
        self.wait(self.comm.Iallgather(own, texts))
        return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in texts]

    def agree(self, failure: str | None) -> None:
        """Raises ``ExchangeError`` on all ranks where one has failed; "" is a failure that another rank knows of."""
        if self.reduce(np.array([failure is not None], np.uint64), MPI.MAX)[0]:
            texts = self.gather_texts(failure or "")
            raise ExchangeError("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text))


def _free(comm: MPI.Comm, keyval: int, channel: Channel) -> None:
    if channel.abandoned is None and not MPI.Is_finalized() and comm != MPI.COMM_WORLD:
        channel.comm.Free()


class LiveTraffic:
    """The messages of one allreduce over MPI."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.rank, self.size = channel.rank, channel.size
        self.failure: str | None = None
        self.sending: deque[tuple[MPI.Request, U8, int]] = deque()
        self.receiving: list[tuple[MPI.Request, U8, int, int, int]] = []

    def attempt(self, default: R, work: Callable[..., R], *arguments: Any) -> R:
        return attempt(self, default, work, *arguments)

    def send(self, to: int, tag: int, parts: list[U8]) -> None:
        message = EMPTY
        if self.failure is None:
            message = parts[0] if len(parts) == 1 else np.concatenate(parts)
        # In words of 8 bytes, MPI's counts of 31 bits reach 16 GiB.
        request = self.channel.comm.Isend([message, message.size // 8, MPI.UINT64_T], to, tag)
        self.sending.append((request, message, to))
        self.channel.sent += message.size

    def run(self, programs: list[Program]) -> None:
        """Runs the programs to their ends, and all sends too."""
        patience = Patience(self.channel.timeout)
        waiting: dict[int, Wants] = {}
        try:
            for slot, program in enumerate(programs):
                self._resume(slot, program, None, waiting)
            while waiting or self.receiving or self.sending:
                if self._receive(waiting) | self._finish(programs, waiting) | self._sent():
                    patience.progress()
                else:
                    ranks = {source for source, _, _ in waiting.values()} | {to for _, _, to in self.sending}
                    ranks |= {source for _, _, source, _, _ in self.receiving}
                    patience.wait("rank " + ", ".join(map(str, sorted(ranks))))
        except BaseException as error:
            # MPI may still write into these.
            self.channel.abandoned = (self.sending, self.receiving)
            if isinstance(error, LostRankError | MPI.Exception):
                raise LostRankError(f"a rank is lost: {error}") from None
            raise

    def _resume(self, slot: int, program: Program, parts: list[U8] | None, waiting: dict[int, Wants]) -> None:
        try:
            waiting[slot] = program.send(parts)  # type: ignore[arg-type]  # None starts a generator
        except StopIteration:
            pass

    def _receive(self, waiting: dict[int, Wants]) -> bool:
        """Begins to receive what has been announced, earlier slots first."""
        begun = False
        status = MPI.Status()
        busy: dict[int, int] = {}
        for _, _, source, _, _ in self.receiving:
            busy[source] = busy.get(source, 0) + 1
        for slot in sorted(waiting):
            source, tag, count = waiting[slot]
            if busy.get(source, 0) >= RECEIVES:
                continue
            announced = self.channel.comm.Improbe(source, tag, status)
            if announced is None:
                busy[source] = RECEIVES  # its later slots can wait: no slot needs another's messages
                continue
            data = np.empty(8 * status.Get_count(MPI.UINT64_T), np.uint8)
            request = announced.Irecv([data, data.size // 8, MPI.UINT64_T])
            self.receiving.append((request, data, source, slot, count))
            del waiting[slot]
            busy[source] = busy.get(source, 0) + 1
            begun = True
        return begun

    def _finish(self, programs: list[Program], waiting: dict[int, Wants]) -> bool:
        """Hands the messages that have come to their programs."""
        came = False
        for entry in list(self.receiving):
            request, data, source, slot, count = entry
            if request.Test():
                self.receiving.remove(entry)
                if not data.size and self.failure is None:
                    self.failure = ""  # the sender has failed, and will say why
                parts = self.attempt([EMPTY] * count, parts_of, data, count, source)
                self._resume(slot, programs[slot], parts, waiting)
                came = True
        return came

    def _sent(self) -> bool:
        """Lets go of the messages that have left, in order: every test makes MPI look at all its connections."""
        left = False
        while self.sending and self.sending[0][0].Test():
            self.sending.popleft()
            left = True
        return left


class Session:
    """One allreduce: the ranks meet and compare what they bring, the programs run, the ranks agree that all went well.

    Args:
        comm: an intracommunicator.
        tensor: this rank's vector; of an array, the elements that are not zero.
        settings: the algorithm and all that must be equal on all ranks, in words.
        dense, out: whether the sum is a dense array, and one to write it to.
        scale: a factor for the sum.
        residual: an array to settle.
        timeout: seconds.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        tensor: SparseTensor | Floats,
        settings: str,
        dense: bool,
        out: Floats | None,
        scale: float,
        residual: Floats | None,
        timeout: float,
    ) -> None:
        self.channel = Channel.of(comm, timeout)
        self.scale = scale
        self.settings, self.residual = settings, residual
        failure = None
        try:
            self.tensor = _checked(tensor, out, residual)
        except (ValueError, TypeError, AttributeError) as error:
            failure = str(error)
            self.tensor = SparseTensor(0, np.empty(0, np.uint32), np.empty(0, np.float32))
        self.dense, self.out, self.failure = dense, out, failure

    def __enter__(self) -> Session:
        self.channel.lock.acquire()
        try:
            if self.channel.abandoned is not None:
                raise LostRankError(
                    "an earlier exchange over this communicator was broken off, a rank was lost: make a new one"
                )
            self._meet()
        except BaseException:
            self.channel.lock.release()
            raise
        self.traffic = LiveTraffic(self.channel)
        self.total = Total(self.tensor.numel, self.tensor.values.dtype, self.dense, self.out, self.scale)
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.lock.release()

    def _meet(self) -> None:
        tensor = self.tensor
        same = np.array([tensor.numel, DTYPE_IDS[tensor.values.dtype], zlib.crc32(self.settings.encode())], np.uint64)
        mine = np.array([self.failure is not None, tensor.indices.size], np.uint64)
        most = self.channel.reduce(np.concatenate([mine, same, ~same]), MPI.MAX)
        if most[0]:
            self.channel.agree(self.failure)
        if np.any(most[2:5] != ~most[5:8]):
            texts = self.channel.gather_texts(f"{self.settings}, {tensor.numel} elements of {tensor.values.dtype}")
            groups: dict[str, list[int]] = {}
            for rank, text in enumerate(texts):
                groups.setdefault(text, []).append(rank)
            sides = (f"{', '.join(map(str, ranks))}: {text}" for text, ranks in groups.items())
            raise ExchangeError(f"the ranks bring what cannot be summed; ranks {'; ranks '.join(sides)}")
        self.most = int(most[1])

    def finish(self, programs: list[Program], value: Callable[[], SparseTensor | Floats]) -> SparseTensor | Floats:
        """Runs the programs; ``value()``, once all ranks have theirs."""
        self.traffic.run(programs)
        total = self.traffic.attempt(None, value)
        self.channel.agree(self.traffic.failure)
        assert total is not None
        return total


def _checked(tensor: SparseTensor | Floats, out: Floats | None, residual: Floats | None) -> SparseTensor:
    if isinstance(tensor, np.ndarray):
        if tensor.ndim != 1 or tensor.dtype not in DTYPE_IDS:
            raise ValueError(f"a dense vector is float32 or float64 [N], not {tensor.dtype}{list(tensor.shape)}")
        tensor = Stream.whole(np.ascontiguousarray(tensor)).sparse()
    for name, array in (("out", out), ("residual", residual)):
        if array is None:
            continue
        if array.dtype != tensor.values.dtype or array.shape != (tensor.numel,) or not array.flags.c_contiguous:
            raise ValueError(
                f"{name} is {array.dtype}{list(array.shape)}; "
                f"a contiguous {tensor.values.dtype}[{tensor.numel}] is needed"
            )
    return tensor
