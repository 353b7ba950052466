"""What an exchange is: it sums buckets over the ranks. The engine and the adapters ask an exchange, whatever it is.

    pending = exchange.start(rank, bucket)      encodes the bucket, and starts its first collective
    exchange.drive([pending.advance, ...])      lets exchanges of several collectives go on together
    pending.result(scale)                       waits; bucket.gradient = scale * (sum over all ranks)

``allgather``, ``sliced`` (reduce_scatter and two levels), ``dense`` and ``mpi/over_mpi`` implement it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from hvd_deepreduce.codecs.interfaces import Floats, RngKey
from hvd_deepreduce.config import Config
from hvd_deepreduce.exchange.collectives import Collectives
from hvd_deepreduce.exchange.traffic import Traffic
from hvd_deepreduce.exchange.two_levels import SliceResidual
from hvd_deepreduce.ops.pieces import Pieces
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.pipeline.bundle import Slice


class Bucket(Protocol):
    """A vector of gradients, as an exchange sees it.

    Attributes:
        name: of its collectives; unique among all exchanges in flight.
        key: of its containers; the same on all ranks but for ``key.rank``.
        gradient: float32 or float64 ``[numel]``; the sum at the end.
        pieces: the gradients, where they are not in ``gradient``: only if ``Exchange.in_one_pass``.
        slices: what of it has a container of its own.
        parts: (begin, end) of each parameter.
        half: ``"bfloat16"`` or ``"float16"`` if all gradients in it have this dtype in the framework; else None.
        finite: whether all elements are known to be finite.
        filling: seconds that copying gradients into it took.
        queue: of the exchanges over MPI. Buckets that are in flight together and have no order need different ones.
        side_stream: as ``Tensors.side_stream``, for its device.
    """

    name: str
    key: RngKey
    gradient: Floats
    pieces: Pieces | None
    slices: Sequence[Slice]
    parts: list[tuple[int, int]]
    half: str | None
    finite: bool
    filling: float
    side_stream: Callable[[], Callable[[], AbstractContextManager[Any]]]

    @property
    def queue(self) -> int: ...


class Rank(Protocol):
    """What an exchange uses of the rank that it works for."""

    feedback: bool
    collectives: Collectives
    stats: Any

    @property
    def config(self) -> Config: ...

    @property
    def pipeline(self) -> Pipeline: ...

    def complete(self, bucket: Any, as_owner: bool = False) -> tuple[Floats | None, Floats | None]:
        """Writes zeros for the bucket's missing gradients. Returns its residual and velocity, to be changed in place.

        Args:
            as_owner: also for what this rank loses as the owner of a slice of the sum; it keeps that if it sends zeros.
        """

    def complete_slice(self, bucket: Any, part: tuple[int, int]) -> tuple[SliceResidual | None, SliceResidual | None]:
        """As ``complete``, of the part (begin, end) of the vector alone."""

    def next_residual(self, bucket: Any, residual: Floats | None) -> Floats | None:
        """Where what becomes of the residual that ``complete`` has returned is to be written, for ``replace_residual``;
        None: into the residual itself."""

    def replace_residual(self, bucket: Any, residual: Floats, other: Floats) -> None:
        """What ``next_residual`` has returned is the residual from now on; the former one's memory may be the bucket's
        vector, which takes the sum."""

    def note_failure(self, error: Exception) -> None:
        """An error while receiving. All ranks raise one of what was sent, since they get the same bytes."""


class Pending(ABC):
    """A bucket's exchange between its start and its result. One thread at a time uses it."""

    __slots__ = ()

    def advance(self) -> bool:
        """Waits for a collective and starts the next, unless the last one is in flight. Returns whether it did so."""
        return False

    @abstractmethod
    def result(self, scale: float) -> None:
        """Waits for the sum: ``bucket.gradient = scale * (sum over all ranks)``.

        Raises:
            ContainerError: a container cannot be decoded, or is of another tensor, parameter, step or config; names its
                rank. Raised on all ranks.
        """

    @abstractmethod
    def add_done_callback(self, call: Callable[[Any], object]) -> None:
        """Calls ``call`` with one argument, on any thread, once ``result`` need not wait for other ranks."""


class Started(Pending):
    """A bucket whose only collective, or whose exchange on a thread of its own, is in flight.

    Args:
        handle: what is in flight; its ``add_done_callback`` calls once it has ended.
        wait: returns what the handle brings.
    """

    __slots__ = ("_bucket", "_handle", "_rank", "_wait")

    def __init__(self, rank: Rank, bucket: Bucket, handle: Any, wait: Callable[[Any], Any]) -> None:
        self._rank, self._bucket, self._handle, self._wait = rank, bucket, handle, wait

    def result(self, scale: float) -> None:
        rank, name = self._rank, self._bucket.name
        with rank.stats.span("wait", name):
            received = self._wait(self._handle)
        with rank.stats.span("decode", name) as span:
            try:
                span.wire = self._decode(received, scale)
            except Exception as error:
                rank.note_failure(error)
                raise

    @abstractmethod
    def _decode(self, received: Any, scale: float) -> Traffic:
        """Writes ``bucket.gradient``, and returns what it has cost, if it was not counted before."""

    def add_done_callback(self, call: Callable[[Any], object]) -> None:
        self._handle.add_done_callback(call)


class FailedStart(Pending):
    """Of a bucket that could not be started. ``result`` raises the error: where it came, other ranks would wait for the
    rest of the step."""

    __slots__ = ("_error",)

    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self, scale: float) -> None:
        raise self._error

    def add_done_callback(self, call: Callable[[Any], object]) -> None:
        call(self)


class Exchange(ABC):
    """How the ranks' buckets become their sum. It does not keep the rank alive that it works for.

    Attributes:
        on_host: whether buckets must be on the host.
        containers: whether a gradient may be exchanged as a container of its own, beside the buckets.
        several: whether a bucket takes several collectives, which ranks may have to start in one order.
        own_thread: whether it encodes and sums on a thread of its own.
    """

    on_host = False
    containers = True
    several = False
    own_thread = False

    @abstractmethod
    def start(self, rank: Rank, bucket: Bucket) -> Pending:
        """Encodes a bucket and starts its exchange. With ``own_thread`` it returns at once."""

    def in_one_pass(self, pipeline: Pipeline, dtype: np.dtype[Any]) -> bool:
        """Whether it takes ``Bucket.pieces``, and writes the residual elsewhere, of buckets of this dtype on the host,
        in the native call that makes all that this pipeline sends."""
        return False

    def start_failed(self, rank: Rank, error: Exception, numel: int) -> Pending | None:
        """Takes part in the exchange of a bucket of so many elements that this rank could not start, so that nobody
        waits. Its ``result`` raises the error on all ranks. None: the exchange has no way to tell."""
        return None

    def most_bytes(self, collectives: Collectives) -> int | None:
        """The largest bucket, in bytes, that is certain to go through the ranks' collectives, whatever is in it. Larger
        ones may be an error. None: any."""
        return None

    def drive(self, turns: Iterable[Callable[[], bool]]) -> None:  # noqa: B027  (only with several collectives)
        """Lets exchanges go on until the last collective of each is in flight.

        Args:
            turns: ``Pending.advance`` of each, in one order on all ranks.
        """

    def overlap(self, turns: Sequence[Callable[[], bool]]) -> None:  # noqa: B027  (only with several collectives)
        """The last of these exchanges has been started, by collectives that are matched by their order."""

    def prepare(self, queues: int) -> None:  # noqa: B027  (only over MPI)
        """Makes what the first so many queues need. All ranks call it at the same time."""
