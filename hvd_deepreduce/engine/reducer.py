"""Drives the engine for adapters that see each gradient of a step as a tensor of their framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import partial
from itertools import repeat
from operator import attrgetter
from threading import Lock
from time import perf_counter
from typing import Any, Generic

import numpy as np

from hvd_deepreduce.codecs.interfaces import Floats
from hvd_deepreduce.engine.buckets import Bucket, BucketLayout, Member
from hvd_deepreduce.engine.engine import Engine
from hvd_deepreduce.engine.parameter import Parameter
from hvd_deepreduce.engine.tensors import Device, G, Tensors
from hvd_deepreduce.engine.ticket import Ticket, in_flight
from hvd_deepreduce.ops import heap
from hvd_deepreduce.ops.dispatch import on_host
from hvd_deepreduce.ops.library import address
from hvd_deepreduce.ops.pieces import Pieces

_NAME = attrgetter("name")


class Reducer(Generic[G]):
    """Takes a step's gradients one by one and replaces them by their sums over all ranks, under any config.

    Gradients travel in buckets in every scope; in scope ``tensor`` each one of a bucket has a container of its own.

    Threads: ``start`` may run on several threads at the same time. ``finish`` may run on another thread than
    ``start_bucket``. One thread calls ``finish``, after all calls of ``start`` have returned. A bucket may be encoded
    and sent by a thread of its own (``busy``) while another one is finished.

    Missing gradients: a parameter without a gradient is sent as zeros if another parameter of its bucket has one. A
    bucket without any gradient is not sent, so all ranks must agree on which buckets these are.

    Args:
        engine: of these ranks.
        tensors: the framework's.
        expected: the parameters that may have gradients in a step, in the model's order, with their gradients'
            devices; the same object as before where neither these nor ``excluded`` have changed. They are divided into
            buckets. None: all of the engine's parameters, on the device of the first gradient.
        excluded: whether a parameter's gradients are in no bucket with others, where the exchange has ``containers``:
            they come rarely, or not to the engine. It may change between steps, on all ranks alike.
        dense: whether a parameter's gradients are summed as they are; None: none's.
        first_number: of the first bucket. Reducers of one engine need different numbers.
        queue: of the exchanges over MPI. Reducers whose gradients can be in flight together need different ones.
        busy: how many threads the framework computes with. Where the rank has more cores, buckets are encoded on a
            thread of their own, while the backward pass goes on; those on a GPU where it has more than one core, since
            the GPU computes. None: always on the caller's thread.
    """

    def __init__(
        self,
        engine: Engine,
        tensors: Tensors[G],
        expected: Callable[[], Iterable[tuple[Parameter, Device]]] | None = None,
        first_number: int = 0,
        queue: int = 0,
        excluded: Callable[[Parameter], bool] | None = None,
        busy: Callable[[], int] | None = None,
        dense: Callable[[Parameter], bool] | None = None,
    ) -> None:
        self._engine = engine
        self._tensors = tensors
        self._expected = expected
        self._excluded, self._dense = excluded, dense
        self._first_number, self._queue = first_number, queue
        self._busy = busy
        self._encoder: ThreadPoolExecutor | None = None
        self._layout: BucketLayout | None = None
        self._laid_out: Iterable[tuple[Parameter, Device]] | None = None  # what ``expected`` has said of it
        self._whole: dict[int, tuple[Any, Bucket]] = {}  # buckets that come as one tensor, by number, the last one
        self._generation = self._generation_of_whole = 0
        self._tickets: dict[str, Ticket[G]] = {}  # of the layout's parameters; what does not change is looked up once
        # By bucket: gradients that stay where they are until it is started, by name, and their views of it.
        self._waiting: dict[str, dict[str, tuple[G, Any]]] = {}
        # The hooks of a model on several devices run on several threads. Exchanges over MPI have no names: a bucket is
        # started under this lock, so that no thread overtakes another between the order and the start.
        self._lock = Lock()

    def count(self) -> int:
        """How many buckets the next step has, where ``expected`` says what comes."""
        with self._lock:
            return len(self._lay_out(None).buckets)

    def start(self, parameter: Parameter, gradient: G, as_view: bool = False, resting: bool = False) -> Ticket[G]:
        """Takes a parameter's gradient of this step.

        Args:
            gradient: ``finish`` overwrites it; it must not be changed before.
            as_view: as DDP's ``gradient_as_bucket_view``: the gradient, or what ``finish`` returns, may alias the
                bucket's memory, which the next step overwrites.
            resting: the parameter is not trained now, and the gradient is zero: what is kept of it stays as it is.

        Raises:
            RuntimeError: the parameter's last gradient, or its last bucket, is still in flight; or an exchange over MPI
                in a job without MPI.
        """
        engine, tensors = self._engine, self._tensors
        if parameter.name in engine.in_flight:
            raise in_flight(parameter)
        device = tensors.device(gradient) if self._expected is None else None
        with self._lock:
            layout = self._layout
            if layout is None or not layout.in_flight or self._generation != engine.generation:
                layout = self._lay_out(device)
            ticket = self._tickets.get(parameter.name)
            if ticket is not None:
                if resting:
                    ticket.bucket.resting.add(parameter.name)
                self._put(ticket, parameter, gradient, layout, as_view)
                return ticket
        back = tensors.return_to(tensors.device(gradient))
        ticket = self.start_bucket((parameter,), parameter.number, gradient, resting)
        ticket.bucket.back = back
        return ticket

    def start_bucket(
        self, parameters: Sequence[Parameter], number: int, gradient: G, resting: bool = False
    ) -> Ticket[G]:
        """Takes a bucket that the framework filled, and starts its exchange.

        Parameters may be divided differently from step to step; their residuals stay with them. On a GPU, ``finish``
        may run on another stream, in order after this one, if ``Tensors.flat`` makes no copy of the gradient.

        Args:
            parameters: whose gradients it holds.
            number: of the bucket in the step; in the same order, with the same parameters, on all ranks.
            gradient: their gradients, one after the other. ``finish`` overwrites it.
            resting: as for ``start``, of all parameters.

        Raises:
            RuntimeError: a parameter's last gradient is still in flight; or an exchange over MPI in a job without MPI.
            ValueError: gradients of different dtypes, too many elements, or not as many as the parameters have.
        """
        engine, tensors = self._engine, self._tensors
        device = tensors.device(gradient)
        bucket = self._whole_bucket(parameters, number, device)
        if not engine.in_flight.isdisjoint(bucket.names):
            raise in_flight(next(one for one in parameters if one.name in engine.in_flight))
        if resting:
            bucket.resting.update(bucket.names)
        if device is None:
            self._start_whole(bucket, gradient)
        else:
            with tensors.stream(device):
                self._start_whole(bucket, gradient)
        return Ticket(parameters, gradient, device, bucket)

    def _start_whole(self, bucket: Bucket, gradient: G) -> None:
        bucket.adopt(self._tensors.flat(gradient, self._engine.exchange.on_host))
        self._engine.mark_full(bucket)
        self._engine.start(bucket)

    def _whole_bucket(self, parameters: Sequence[Parameter], number: int, device: Device) -> Bucket:
        """The bucket of ``start_bucket``, made once for the same parameters."""
        engine = self._engine
        if self._generation_of_whole != engine.generation:
            self._whole.clear()
            self._generation_of_whole = engine.generation
        where = None if engine.exchange.on_host else device
        key = where, list(map(_NAME, parameters))
        known, bucket = self._whole.get(number, (None, None))
        if bucket is None or known != key:
            layout = BucketLayout([Member(one, one.numel, where) for one in parameters], None, number)
            if len(layout.buckets) != 1:
                raise ValueError(
                    "a bucket holds gradients of one dtype and at most 2^31 - 1 elements, but this one holds "
                    f"{sum(parameter.numel for parameter in parameters)} elements of "
                    f"{', '.join(sorted({parameter.dtype for parameter in parameters}))}: divide it"
                )
            (bucket,) = layout.buckets
            bucket.side_stream = partial(self._tensors.side_stream, where)
            if where is None:
                heap.keep_freed()
            self._whole[number] = key, bucket
        return bucket

    def finish(self, ticket: Ticket[G], scale: float) -> G:
        """Waits until a gradient is reduced: ``ticket.gradient = scale * (sum over all ranks)``.

        Returns:
            This gradient; with ``as_view`` it may be another tensor, a view of the bucket.

        The step's first call starts the buckets that are not full. So it comes after the backward pass.

        Raises:
            ContainerError: a container cannot be decoded; names its rank. Raised on all ranks.
        """
        engine, tensors = self._engine, self._tensors
        bucket, gradient, name = ticket.bucket, ticket.gradient, ticket.parameters[0].name
        assert gradient is not None
        if not bucket.summed:
            self._receive(bucket, scale)
        # Optimizers with different scales may share a bucket.
        rest = 1.0 if scale == bucket.scale else scale / bucket.scale
        begin = perf_counter()
        try:
            if bucket.adopted:
                with tensors.stream(ticket.device):
                    tensors.write(gradient, bucket.gradient, rest)
                    if bucket.back is not None:
                        bucket.back()
            elif ticket.device is None:
                view = bucket.views.get(name)
                if view is None:
                    view = self._view(bucket, name, gradient)
                if ticket.coalesced:
                    gradient = view
                tensors.copy_out(gradient, view, rest)
            elif rest != 1.0:
                with tensors.stream(ticket.device):
                    tensors.copy_out(gradient, self._view(bucket, name, gradient), rest)
        except Exception as error:  # ``receiving`` takes longer, and there are many gradients
            engine.note_failure(error)
            raise
        bucket.emptying += perf_counter() - begin
        if bucket.adopted:
            engine.release_all(bucket)
        else:
            engine.in_flight.discard(name)
            bucket.layout.release(bucket, ticket.parameters[0])
        if not bucket.ready:  # all have been read
            engine.stats.add(decode=bucket.emptying)
            bucket.emptying = 0.0
        ticket.gradient = None
        return gradient

    def _receive(self, bucket: Bucket, scale: float) -> None:
        """The bucket's vector becomes the sum. The step's first call starts the buckets that are not full."""
        engine, tensors, layout = self._engine, self._tensors, bucket.layout
        if layout.started < len(layout.buckets):
            for late in layout.flush():
                self._start(late)
        if bucket.started is not None:
            bucket.started.result()
        exchange = engine.exchange
        if exchange.several:
            exchange.drive([partial(self._advance, other) for other in layout.buckets])
        if bucket.device is None:
            engine.receive(bucket, scale)
        else:
            with tensors.stream(bucket.device):
                if bucket.started is not None:
                    tensors.join(bucket.device)
                engine.receive(bucket, scale)
                if bucket.back is not None and not bucket.adopted:  # what was adopted is still to be read
                    bucket.back()
        if bucket.arrived:
            self._return_arrived(bucket)

    def advance(self, ticket: Ticket[G]) -> bool:
        """Lets the exchange of a bucket that the framework filled go on, as ``exchange.interface.Pending.advance``."""
        return self._advance(ticket.bucket)

    def _advance(self, bucket: Bucket) -> bool:
        if bucket.pending is None or bucket.summed:
            return False
        with self._tensors.stream(bucket.device):
            return bool(bucket.pending.advance())

    @property
    def buckets(self) -> Sequence[Bucket]:
        """Those of the last step."""
        return () if self._layout is None else self._layout.buckets

    def settle(self) -> None:
        """Gradients in flight are about to be forgotten: full buckets are still sent, since other ranks wait for them.
        Errors are not raised."""
        for bucket in self._layout.buckets if self._layout is not None else ():
            if bucket.started is not None:
                bucket.started.exception()
                self._tensors.join(bucket.device)

    def complete(self) -> None:
        """After an error in ``finish``: starts what is left of the step, and lets its exchanges go on until the last
        collective of each is in flight. Other errors are not raised."""
        layout = self._layout
        if layout is None:
            return
        for late in layout.flush():
            with suppress(Exception):
                self._start(late)
        self.settle()
        self._engine.exchange.drive([partial(self._advances, bucket) for bucket in layout.buckets])

    def _advances(self, bucket: Bucket) -> bool:
        with suppress(Exception):
            return self._advance(bucket)
        return False

    def _encoding_thread(self, on_host: bool) -> ThreadPoolExecutor | None:
        """Where a core is free for it, and the exchange has no thread that encodes. The collectives of an exchange of
        several are counted as they are started.

        Args:
            on_host: whether any bucket is. On a GPU, the backward pass takes one core, and the thread waits for the
                size of each container in its place.
        """
        engine, exchange = self._engine, self._engine.exchange
        if self._busy is None or exchange.own_thread or exchange.several:
            return None
        if engine.cores <= (self._busy() if on_host else 1):
            return None
        return self._encoder or ThreadPoolExecutor(1, "deepreduce encode")

    def _put(
        self, ticket: Ticket[G], parameter: Parameter, gradient: G, layout: BucketLayout, as_view: bool
    ) -> None:
        """Copies a gradient into its bucket; starts the bucket if that is full."""
        tensors, bucket, device = self._tensors, ticket.bucket, ticket.device
        if bucket.number < layout.first_number + layout.started:
            raise RuntimeError(
                f"backward() ran again before the previous step's bucket results were consumed (gradient of "
                f"{parameter.name}): let every optimizer step before the next backward(), or give each optimizer "
                "its own DeepReduce"
            )
        ticket.gradient = gradient
        begin = perf_counter()
        if device is None:
            if not bucket.ready:
                bucket.finite, bucket.waits = True, self._engine.takes_pieces(bucket)
                if not bucket.gradient.size or not isinstance(bucket.gradient, np.ndarray):
                    bucket.allocate(None)
            view = bucket.views.get(parameter.name)
            if view is None:
                view = self._view(bucket, parameter.name, gradient)
            waits = (bucket.waits or (as_view and ticket.small)) and tensors.can_wait(gradient, view)
            ticket.coalesced = as_view and waits
            if waits:
                self._waiting.setdefault(bucket.name, {})[parameter.name] = gradient, view
            elif not tensors.copy_in(gradient, view, as_view):
                bucket.finite = False
        else:
            ticket.coalesced = False
            self._remember(device, bucket, parameter, gradient, as_view)
        bucket.filling += perf_counter() - begin
        self._engine.in_flight.add(parameter.name)
        to_start = layout.mark_ready(bucket, parameter)
        if bucket.arrived and bucket.full:  # at once: their memory is needed, and another bucket may be awaited
            self._put_arrived(bucket)
        for ready in to_start:
            self._start(ready)

    def _remember(self, device: Device, bucket: Bucket, parameter: Parameter, gradient: G, as_view: bool) -> None:
        """Notes a gradient on this device, which may be another than the bucket's. The bucket's are copied together:
        the host takes longer for one than the GPU."""
        tensors = self._tensors
        bucket.finite = False
        on_gpu = bucket.device is not None
        if not bucket.ready and not (bucket.gradient.size and on_host(bucket.gradient) != on_gpu):
            with tensors.stream(device):
                bucket.allocate(tensors.flat(gradient) if on_gpu else None)
        arrived = parameter.name, gradient, as_view, tensors.now(device)
        bucket.arrived.setdefault(device, []).append(arrived)

    def _put_arrived(self, bucket: Bucket) -> None:
        """Copies the gradients on GPUs into their bucket. A new one was filled with zeros on the stream of one of
        them, so that these are waited for, too."""
        begin, tensors = perf_counter(), self._tensors
        for device, arrived in bucket.arrived.items():
            with tensors.stream(device):
                tensors.copy_in_from(
                    device, [(one, self._view(bucket, name, one), as_view, now) for name, one, as_view, now in arrived]
                )
                bucket.filled = tensors.record(bucket.device)
        bucket.filling += perf_counter() - begin

    def _return_arrived(self, bucket: Bucket) -> None:
        """Copies the sums back into the gradients on GPUs."""
        begin, tensors = perf_counter(), self._tensors
        with self._engine.receiving():
            for device, arrived in bucket.arrived.items():
                with tensors.stream(device):
                    tensors.copy_out_many([(one, self._view(bucket, name, one)) for name, one, *_ in arrived])
        bucket.emptying += perf_counter() - begin

    def _view(self, bucket: Bucket, name: str, gradient: G) -> Any:
        """A parameter's part of the bucket, in the form of ``Tensors.view``."""
        view = bucket.views.get(name)
        if view is None:
            view = bucket.views[name] = self._tensors.view(bucket.part(name), gradient)
        return view

    def _put_waiting(self, bucket: Bucket, waiting: Mapping[str, tuple[G, Any]]) -> None:
        """Makes pieces of the gradients of a bucket that have waited, if all have; otherwise copies them."""
        begin = perf_counter()
        if len(waiting) == len(bucket.ready) and self._engine.takes_pieces(bucket):
            addresses = dict(zip(waiting, self._tensors.addresses(waiting.values()), strict=True))
            zeros: Floats = np.zeros(max(bucket.sizes) if len(waiting) < len(bucket.sizes) else 0, bucket.dtype)
            where = map(addresses.get, bucket.names, repeat(address(zeros)))
            bucket.pieces = Pieces(list(where), bucket.sizes, bucket.dtype, (waiting, zeros))
            bucket.finite = False  # it will be found out
        elif not self._tensors.copy_in_many(waiting.values()):
            bucket.finite = False
        bucket.filling += perf_counter() - begin

    def _start(self, bucket: Bucket) -> None:
        waiting = self._waiting.pop(bucket.name, None)
        if waiting is not None:
            self._put_waiting(bucket, waiting)
        if bucket.arrived and not bucket.full:
            self._put_arrived(bucket)
        if bucket.device is None:
            if self._encoder is not None:
                bucket.started = self._encoder.submit(self._engine.start, bucket)
            else:
                self._engine.start(bucket)
            return
        tensors = self._tensors  # the caller may be on another device's stream, and not on that of the copies
        if self._encoder is not None:
            bucket.started = self._encoder.submit(self._start_within, tensors.side_stream(bucket.device), bucket)
        else:
            bucket.back = tensors.return_to(bucket.device)
            self._start_within(lambda: tensors.stream(bucket.device), bucket)

    def _start_within(self, stream: Callable[[], AbstractContextManager[Any]], bucket: Bucket) -> None:
        with stream():
            if bucket.filled is not None:
                bucket.filled()
            self._engine.start(bucket)

    def _lay_out(self, device: Device) -> BucketLayout:
        """The layout for the step that begins; a new one where a parameter has no bucket.

        Args:
            device: of the first gradient, where nobody says what to expect.
        """
        engine, layout = self._engine, self._layout
        given: Iterable[tuple[Parameter, Device]] | None = None
        if self._expected is not None:
            given = self._expected()
            if given is self._laid_out and layout is not None and self._generation == engine.generation:
                return layout
            expected = list(given)
        else:
            expected = [(one, device) for one in engine.parameters.values()]
        exchange, dense = engine.exchange, self._dense
        if self._excluded is not None and exchange.containers:
            expected = [(parameter, where) for parameter, where in expected if not self._excluded(parameter)]
        if (
            layout is None
            or self._generation != engine.generation
            or len(layout.bucket_of) != len(expected)
            or any(parameter.name not in layout.bucket_of for parameter, _ in expected)
        ):
            members = [
                Member(one, one.numel, None if exchange.on_host else where, dense is not None and dense(one))
                for one, where in expected
            ]
            layout = self._layout = BucketLayout(members, engine.max_bucket_bytes, self._first_number, self._queue)
            for bucket in layout.buckets:
                bucket.side_stream = partial(self._tensors.side_stream, bucket.device)
            self._generation = engine.generation
            some_on_host = any(where is None for _, where in expected)
            if some_on_host:
                heap.keep_freed()
            self._encoder = self._encoding_thread(some_on_host)
            self._waiting.clear()
            self._tickets = {
                parameter.name: Ticket((parameter,), None, None, layout.bucket_of[parameter.name])
                for parameter, _ in expected
            }
        for parameter, where in expected:
            ticket = self._tickets[parameter.name]
            ticket.device, ticket.small = where, parameter.numel <= self._tensors.small
        self._laid_out = given
        return layout
