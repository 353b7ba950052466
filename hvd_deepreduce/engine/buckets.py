"""Buckets: vectors of several parameters' gradients, each selected, encoded and exchanged as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from hvd_deepreduce.codecs.interfaces import Floats, RngKey
from hvd_deepreduce.engine.parameter import Parameter
from hvd_deepreduce.engine.tensors import Device
from hvd_deepreduce.ops import arrays
from hvd_deepreduce.ops.dispatch import on_host
from hvd_deepreduce.ops.pieces import Pieces

MAX_NUMEL = 2**31 - 1
"""Elements of a bucket of several parameters, which top-k on a GPU can take. It is the same on the host, since the
ranks must divide the parameters alike."""
_STEP = attrgetter("step")
_ON_HOST: Floats = np.empty(0, np.float32)


class Member(NamedTuple):
    """A parameter whose gradients go into buckets.

    Attributes:
        numel: number of elements of its gradients.
        device: where the bucket's vector is to be.
        dense: whether its gradients are summed as they are.
    """

    parameter: Parameter
    numel: int
    device: Device = None
    dense: bool = False


def _alike(member: Member) -> tuple[Any, ...]:
    """What the members of a bucket have in common."""
    return member.parameter.accumulated_in, member.parameter.repeated, member.device, member.dense


class Bucket:
    """A step's gradients of neighbouring parameters, one after the other in one vector.

    Attributes:
        name: of its exchange; unique among all exchanges in flight.
        number: takes the parameter number's place in its containers' keys. A layout's buckets are exchanged in the
            order of their numbers.
        layout: all buckets that are filled in the same step.
        members: the parameters, in the model's order.
        sizes: their numbers of elements.
        parts: (begin, end) of each in ``gradient``.
        names: theirs.
        ready: the names of those whose gradients are there.
        resting: the names of those of them that are not trained now. As of those that are missing, zeros are sent of
            them, and what is kept of them stays as it is.
        read: how many results have been read.
        dtype: float32 or float64.
        half: as ``Parameter.half``, if all members have the same.
        device: of the stream on which it is encoded and decoded.
        side_stream: as ``Tensors.side_stream``, for its device.
        step: for its containers' keys: the largest of the members' steps.
        key: of its containers; set by ``Engine.start``.
        gradient: ``[numel]``; after ``Engine.receive`` ``scale`` times the sum over all ranks. Allocated by
            ``allocate`` or the first ``put``.
        former: the vector that ``clear_missing`` has replaced, until the step's results have been read.
        views: of the members' parts of ``gradient``, by name, as a framework has made them.
        arrived: this step's gradients on GPUs, which are copied into the bucket together, and out of it: by device,
            each with its parameter's name, whether it may become a view, and ``Tensors.now`` of its arrival.
        filled: makes the current stream wait until they are in the bucket; None: nothing is to be waited for.
        back: from ``Tensors.return_to``, where it was encoded on the caller's stream, and its sum is read on another.
        scale: what the sum was multiplied by.
        filling, emptying: seconds that copies into the bucket, and out of it, have taken in this step.
        adopted: whether ``gradient`` is not the bucket's own.
        pieces: the gradients where they came, in place of ``gradient``, which becomes the next residual; None: they
            are in ``gradient``.
        finite: whether all gradients in it are known to be finite.
        waits: whether gradients that come in this step may stay where they are.
        started: the start of its exchange on another thread; None: it is started on the caller's.
        plan: what the engine has found out about the members, for all steps under one config.
        dense: whether it is summed as it is.
        slices: what has a container of its own in this step; set by ``Engine.start``.
        pending: what the exchange returned when it was started; None before.
        summed: whether ``gradient`` is the sum.
    """

    def __init__(self, name: str, number: int, layout: BucketLayout, members: Sequence[Member]) -> None:
        self.name = name
        self.number = number
        self.layout = layout
        self.members = [member.parameter for member in members]
        self.sizes = [member.numel for member in members]
        self.dtype = members[0].parameter.accumulated_in
        halves = {member.parameter.half for member in members}
        self.half = halves.pop() if len(halves) == 1 else None
        self.device, self.dense = members[0].device, members[0].dense
        self.side_stream: Callable[[], Callable[[], AbstractContextManager[Any]]] = lambda: nullcontext
        ends = np.cumsum(self.sizes).tolist()
        self.parts: list[tuple[int, int]] = list(zip([0, *ends], ends, strict=False))
        self.gradient: Floats = np.empty(0, self.dtype)
        self.views: dict[str, Any] = {}
        self.arrived: dict[Device, list[tuple[str, Any, bool, Any]]] = {}
        self.filled: Callable[[], None] | None = None
        self.back: Callable[[], None] | None = None
        self.scale = 1.0
        self.filling = self.emptying = 0.0
        self.step = 0
        self.key = RngKey(0, number, 0)
        self.started: Future[None] | None = None
        self.pending: Any = None
        self.plan: Any = None
        self.slices: Sequence[Any] = ()
        self.summed = self.finite = self.adopted = self.waits = False
        self.former: Floats | None = None
        self.pieces: Pieces | None = None
        self._other: tuple[Floats, dict[str, Any]] | None = None  # the vector before ``replace``, and its views
        self._numel: int = ends[-1]
        self._part_of = {p.name: part for p, part in zip(self.members, self.parts, strict=True)}
        self.names = tuple(self._part_of)
        self.ready: set[str] = set()
        self.resting: set[str] = set()
        self.read = 0

    def allocate(self, like: Floats | None) -> None:
        """Puts the vector where ``like`` is; None: on the host. What was in a vector elsewhere is lost."""
        like = _ON_HOST if like is None else like
        if self.gradient.size != self._numel or on_host(self.gradient) != on_host(like):
            self.gradient = arrays.zeros(self._numel, self.dtype, like)
            self.views.clear()

    def adopt(self, vector: Floats) -> None:
        """Uses a vector that holds all members' gradients already; ``Engine.receive`` overwrites it.

        Raises:
            ValueError: it has another number of elements than the members.
        """
        if vector.size != self._numel:
            raise ValueError(
                f"{self.name} was given {vector.size} elements, but its parameters have {self._numel}: give it the "
                "gradients of all of its parameters, one after the other"
            )
        self.gradient, self.adopted = vector, True

    def put(self, parameter: Parameter, gradient: Floats) -> None:
        """Copies a member's gradient, ``[numel of it]``, into the vector."""
        self.allocate(gradient)
        self.part(parameter.name)[:] = gradient

    def gather(self) -> None:
        """Copies ``pieces`` into the vector."""
        assert self.pieces is not None
        self.gradient[:] = self.pieces.joined()
        self.pieces = None

    def replace(self, vector: Floats) -> None:
        """The vector has become the residual, and the former residual is the vector from now on."""
        views = self._other[1] if self._other is not None and self._other[0] is vector else {}
        self._other = self.gradient, self.views
        self.gradient, self.views, self.pieces = vector, views, None

    def part(self, name: str) -> Floats:
        """The view of ``gradient`` that belongs to the member with this name."""
        begin, end = self.part_of(name)
        return self.gradient[begin:end]

    def part_of(self, name: str) -> tuple[int, int]:
        """Where the member with this name begins and ends in ``gradient``."""
        return self._part_of[name]

    @property
    def queue(self) -> int:
        """The queue of its exchanges over MPI."""
        return self.layout.queue

    @property
    def present(self) -> list[Parameter]:
        """The members whose gradients are there."""
        return [parameter for parameter in self.members if parameter.name in self.ready]

    @property
    def at_rest(self) -> list[Parameter]:
        """The members that are missing or resting."""
        return [one for one in self.members if one.name not in self.ready or one.name in self.resting]

    @property
    def full(self) -> bool:
        """Whether all members' gradients are there."""
        return len(self.ready) == len(self.members)

    @property
    def empty(self) -> bool:
        """Whether no member's gradient is there."""
        return not self.ready

    def count_step(self) -> None:
        """The members' next step begins. A member without a gradient is sent as zeros and counts the step too: which
        gradients are missing may differ from rank to rank, and the containers' steps may not."""
        self.step = max(map(_STEP, self.members))
        for parameter in self.members:
            parameter.step = self.step + 1

    def clear_missing(self) -> None:
        """Writes zeros for members that have no gradient in this step.

        The vector is a new one then: gradients of earlier steps may be views of the old one, and these members' are not
        overwritten.
        """
        if self.views:
            self.former = self.gradient  # on a GPU, it belongs to another stream than the one that copies
            self.gradient = self.gradient.copy() if self.pieces is None else np.empty_like(self.gradient)
            self.views.clear()
        if self.pieces is not None:
            return  # they have the zeros
        for parameter in self.members:
            if parameter.name not in self.ready:
                self.part(parameter.name).fill(0)

    def release_all(self) -> None:
        """All results have been read; the bucket can be filled again."""
        self.ready.clear()
        self.resting.clear()
        self.arrived.clear()
        self.read, self.filling = 0, 0.0
        self.started, self.pending, self.former, self.pieces = None, None, None, None
        self.filled, self.back = None, None
        self.summed = self.finite = False
        if self.adopted:
            self.gradient = np.empty(0, self.dtype)


class BucketLayout:
    """Divides parameters into buckets, and gives the order in which a step's buckets are exchanged.

    Gradients arrive roughly in the reverse of the model's order, so the first bucket holds the last parameters. A
    bucket ends where it would exceed ``max_bytes`` or 2^31 - 1 elements, and where dtype or device changes.
    Buckets of ``repeated`` parameters come first, with the same numbers on all ranks that hold these.

    Args:
        members: in the model's order.
        max_bytes: of a bucket's vector, unless it has one member only; None: no limit.
        first_number: the first bucket's number.
        queue: which of the engine's queues exchanges these buckets over MPI. Layouts whose buckets can be in flight
            at the same time need different queues.

    Attributes:
        first_number: as given.
        in_flight: how many gradients are in buckets.
        started: of how many buckets the exchange was started; no gradient of this step can go into those any more.
    """

    def __init__(self, members: Sequence[Member], max_bytes: int | None, first_number: int = 0, queue: int = 0) -> None:
        runs: list[list[Member]] = []
        held = 0
        for member in sorted(reversed(members), key=lambda one: (one.parameter.repeated, not one.dense), reverse=True):
            dtype = member.parameter.accumulated_in
            held += member.numel
            if (
                not runs
                or held > MAX_NUMEL
                or (max_bytes is not None and held * dtype.itemsize > max_bytes)
                or _alike(runs[-1][0]) != _alike(member)
            ):
                runs.append([])
                held = member.numel
            runs[-1].insert(0, member)
        self.buckets = [
            Bucket(f"bucket.{run[0].parameter.name}", number, self, run)
            for number, run in enumerate(runs, first_number)
        ]
        self.bucket_of = {parameter.name: bucket for bucket in self.buckets for parameter in bucket.members}
        self.queue = queue
        self.first_number = first_number
        self.started = 0
        self.in_flight = 0

    def mark_ready(self, bucket: Bucket, parameter: Parameter) -> list[Bucket]:
        """A parameter's gradient is in its bucket.

        Returns:
            The buckets whose exchanges must be started now, in this order: full, and no earlier bucket is missing.
        """
        self.in_flight += 1
        bucket.ready.add(parameter.name)
        return self._to_start() if len(bucket.ready) == len(bucket.members) else []

    def mark_full(self, bucket: Bucket) -> list[Bucket]:
        """As ``mark_ready``, for all members of a bucket that none was marked of."""
        self.in_flight += len(bucket.members)
        bucket.ready.update(bucket.names)
        return self._to_start()

    def _to_start(self) -> list[Bucket]:
        begin = self.started
        for bucket in self.buckets[begin:]:
            if not bucket.full:
                break
            self.started += 1
        return self.buckets[begin : self.started]

    def flush(self) -> list[Bucket]:
        """No more gradients come in this step.

        Returns:
            The other buckets that hold a gradient; their exchanges must be started now, in this order.
        """
        begin = self.started
        if begin == len(self.buckets):
            return []
        self.started = len(self.buckets)
        return [bucket for bucket in self.buckets[begin:] if not bucket.empty]

    def release(self, bucket: Bucket, parameter: Parameter) -> None:
        """A parameter's result has been read; after the bucket's last one it can be filled again, and after that of all
        buckets the next step can begin."""
        bucket.read += 1
        if bucket.read == len(bucket.ready):
            bucket.release_all()
        self.in_flight -= 1
        # A bucket may have come and gone before the next one's gradients are there.
        if not self.in_flight and self.started == len(self.buckets):
            self.started = 0

    def release_all(self, bucket: Bucket) -> None:
        """As ``release``, for all members of a full bucket."""
        bucket.release_all()
        self.in_flight -= len(bucket.members)
        if not self.in_flight and self.started == len(self.buckets):
            self.started = 0
