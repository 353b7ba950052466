"""Scopes larger than a tensor: a bucket is one vector of several parameters' gradients, selected and sent as one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hvd_deepreduce.adapter import Adapter, Parameter
from hvd_deepreduce.codec import U8, Floats, Key
from hvd_deepreduce.config import Config
from hvd_deepreduce.ops import arrays
from hvd_deepreduce.ops.dispatch import on_host
from hvd_deepreduce.sparse import MAX_NUMEL, SparseTensor

Parameters = Sequence[tuple[str, int, np.dtype[Any], str]]
"""(name, numel, dtype to accumulate in, device; "": the host) of parameters."""


@dataclass
class Bucket:
    """Some parameters of the model, in its order, and a step's gradient of them.

    Attributes:
        name: of its exchange; no other bucket of the job has it, another DeepReduce's neither.
        number: the parameter of its containers' keys; buckets are sent in the order of their numbers.
        layout: all buckets of its model.
        members: the parameters' names.
        sizes: their numbers of elements.
        dtype: float32 or float64, in which they are accumulated.
        step: of the gradient that is in it.
        gradient: ``[numel]``, the members' gradients one behind the other; then the ranks' sum.
        came: members whose gradient of this step is in ``gradient``.
        taken: members whose sum has been taken out.
        pending: what the exchange returned when it was started; None before.
        summed: whether ``gradient`` is the sum.
    """

    name: str
    number: int
    layout: Layout
    members: list[str]
    sizes: list[int]
    dtype: np.dtype[Any]
    step: int = 0
    came: set[str] = field(default_factory=set)
    taken: set[str] = field(default_factory=set)
    pending: Any = None
    summed: bool = False

    def __post_init__(self) -> None:
        ends = np.cumsum(self.sizes).tolist()
        self.parts = list(zip([0, *ends], ends, strict=False))
        self.gradient: Floats = np.zeros(ends[-1], self.dtype)
        self._parts_of = dict(zip(self.members, self.parts, strict=True))

    def put(self, name: str, gradient: Floats) -> None:
        """The member's gradient goes in."""
        self.move(gradient)
        self.part(name)[:] = gradient

    def move(self, like: Floats) -> None:
        """All of a bucket lies where its members' gradients lie; what was in it may be lost."""
        if on_host(self.gradient) != on_host(like):
            self.gradient = arrays.zeros(self.gradient.size, self.dtype, like)

    def part(self, name: str) -> Floats:
        """The member's stretch of ``gradient``, a view."""
        begin, end = self._parts_of[name]
        return self.gradient[begin:end]

    @property
    def full(self) -> bool:
        """Whether every member's gradient is there."""
        return len(self.came) == len(self.members)

    def clear_absent(self) -> None:
        """Zeros for members that had no gradient in this step."""
        for name in self.members:
            if name not in self.came:
                self.part(name).fill(0)

    def took(self, name: str) -> None:
        """The member's sum was taken out; with the last one the bucket is ready for the next step."""
        self.taken.add(name)
        if self.taken >= self.came:
            self.came.clear()
            self.taken.clear()
            self.pending, self.summed = None, False


class Layout:
    """The buckets of a model, and how many of them were sent in this step.

    Gradients come in about the model's reverse order, so the first bucket holds its last parameters. A bucket ends
    where it would pass ``limit`` bytes, 2^32 - 1 elements, or change its dtype or device.

    Args:
        parameters: all of them, in the model's order.
        limit: None: none.
        first: the number of the first bucket.
        order: which of the adapter's queues its exchanges over MPI take; buckets of two layouts may go at a time.

    Attributes:
        started: how many were sent.
        run, key: what the adapter knows of the step under way, and by what it finds the layout.
    """

    def __init__(
        self,
        parameters: Parameters,
        limit: int | None,
        first: int = 0,
        order: int = 0,
    ) -> None:
        runs: list[list[tuple[str, int, np.dtype[Any], str]]] = []
        for parameter in reversed(parameters):
            _, numel, dtype, device = parameter
            last = runs[-1] if runs else []
            held = sum(size for _, size, _, _ in last)
            whole = held + numel > MAX_NUMEL or (limit is not None and (held + numel) * dtype.itemsize > limit)
            if not last or whole or last[0][2:] != (dtype, device):
                runs.append([])
            runs[-1].insert(0, parameter)
        self.buckets = [
            Bucket(f"bucket.{run[0][0]}", number, self, [one[0] for one in run], [one[1] for one in run], run[0][2])
            for number, run in enumerate(runs, first)
        ]
        self.bucket_of = {name: bucket for bucket in self.buckets for name in bucket.members}
        self.order = order
        self.started = 0
        self.run: Any = None
        self.key: Any = None


class BucketedAdapter(Adapter):
    """An adapter that can send buckets, by Horovod's allgather or by an exchange over mpi4py."""

    def __init__(
        self, config: str | Path | Mapping[str, Any] | Config | None, process_set: Any, settings: Mapping[str, Any]
    ) -> None:
        super().__init__(config, process_set, settings)
        self._layout: Layout | None = None
        self._queues: list[Any] = []

    @abstractmethod
    def _start_allgather(self, packed: U8, name: str) -> Any:
        """Starts an allgather of a container; the name is unique within a step."""

    @abstractmethod
    def _wait_allgather(self, pending: Any) -> U8:
        """Its result."""

    @abstractmethod
    def _mpi_enabled(self) -> bool:
        """Whether the job runs on MPI."""

    @abstractmethod
    def _mpi_ranks(self) -> list[int] | None:
        """The process set's ranks in MPI's world; None: all of them."""

    def set_config(
        self, config: str | Path | Mapping[str, Any] | Config | None = None, /, **settings: Any
    ) -> None:
        """As ``Adapter.set_config``."""
        super().set_config(config, **settings)
        self._layout = None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As ``Adapter.load_state_dict``."""
        super().load_state_dict(state)
        self._layout = None

    @property
    def _over_mpi(self) -> bool:
        """Whether buckets go by an exchange over MPI, which works on the host, and not by Horovod's allgather."""
        return self._config.exchange.name != "allgather"

    def _limit(self) -> int | None:
        """Of a bucket, in bytes."""
        return self._config.bucket_bytes if self._config.scope == "bucket" else None

    def _bucket_of(self, parameter: Parameter, trained: Callable[[], Parameters]) -> Bucket:
        """The parameter's bucket. A step's first gradient lays all of them out, where a parameter has none yet.

        Args:
            trained: gives all parameters whose gradients can come.
        """
        if not self._in_flight:
            parameters = trained()
            if self._layout is None or any(one[0] not in self._layout.bucket_of for one in parameters):
                self._layout = Layout(parameters, self._limit())
        assert self._layout is not None
        bucket = self._layout.bucket_of[parameter.name]
        if bucket.pending is not None:
            raise RuntimeError(
                f"a gradient of {parameter.name} came before all those that travelled with its last one were taken: "
                "let every optimizer step before the next backward(), or give each optimizer a DeepReduce of its own"
            )
        return bucket

    def _came(self, bucket: Bucket, parameter: Parameter) -> None:
        """The parameter's gradient lies in the bucket; a full bucket is sent, after those before it."""
        self._in_flight.add(parameter.name)
        bucket.step = max(bucket.step, parameter.step)  # the same on all ranks, in whatever order members come
        parameter.step += 1
        bucket.came.add(parameter.name)
        layout = bucket.layout
        while layout.started < len(layout.buckets) and layout.buckets[layout.started].full:
            layout.started += 1
            self._start(layout.buckets[layout.started - 1])

    def _start(self, bucket: Bucket) -> None:
        """Sends a bucket, whose ``pending`` is then there; one without any gradient has nothing to send."""
        if not bucket.came:
            return
        bucket.clear_absent()
        config, pipeline = self._config, self._ready()
        key = Key(config.seed, bucket.number, bucket.step, self._process_set.rank())
        residual = None
        if config.error_feedback:
            residual = self._memory.joined(bucket.members, bucket.sizes, bucket.dtype, bucket.gradient)
        parts = bucket.parts if config.selection == "tensor" else None
        if not self._over_mpi:
            with self._stats.timed("encode"):
                packed = pipeline.encode(bucket.gradient, residual, key, parts)
            self._stats.sending(packed.size, 0)
            bucket.pending = self._start_allgather(packed, bucket.name)
            return

        def select() -> tuple[SparseTensor | Floats, Floats | None]:
            with self._stats.timed("encode"):
                selected = pipeline.select(bucket.gradient, residual, key, parts)
            if selected is None:
                return bucket.gradient.copy(), None  # not finite: it goes whole, and the residual stays as it was
            indices, values = selected
            return values if indices is None else SparseTensor(bucket.gradient.size, indices, values), residual

        queue = self._exchange_queue(bucket.layout.order)
        bucket.pending = queue.submit(config.exchange, select, bucket.gradient, key)

    def _exchange_queue(self, order: int) -> Any:
        """One of the adapter's queues. All ranks make them at the same time.

        Raises:
            RuntimeError: the job does not run on MPI, or on one without support for several threads.
        """
        while len(self._queues) <= order:
            if not self._mpi_enabled():
                raise RuntimeError(
                    f"exchange {self._config.exchange.name!r} goes over MPI, and this job was started with Gloo: start "
                    "it with horovodrun --mpi or mpirun, or use exchange 'allgather'"
                )
            # It needs mpi4py, which a job with the allgather exchange may not have.
            from hvd_deepreduce.exchange.queue import ExchangeQueue

            self._queues.append(ExchangeQueue(self._mpi_ranks()))
        return self._queues[order]

    def _sum_bucket(self, bucket: Bucket) -> None:
        """Makes ``bucket.gradient`` the ranks' sum. The first call of a step sends the buckets that are not full."""
        layout = bucket.layout
        for late in layout.buckets[layout.started :]:
            layout.started += 1
            self._start(late)
        if not bucket.summed:
            self._receive(bucket)

    def _receive(self, bucket: Bucket) -> None:
        """Waits for a bucket that was sent; its gradient is the ranks' sum then."""
        if not self._over_mpi:
            with self._stats.timed("wait"):
                gathered = self._wait_allgather(bucket.pending)
            with self._stats.timed("decode"):
                self._decode(gathered, bucket.gradient, self._process_set.size())
        else:
            with self._stats.timed("wait"):
                self._stats.sending(bucket.pending.result(), 0)
        bucket.summed = True

    def _took(self, bucket: Bucket, parameter: Parameter) -> None:
        """The parameter has its reduced gradient."""
        self._in_flight.discard(parameter.name)
        bucket.took(parameter.name)
        if not self._in_flight:
            bucket.layout.started = 0
            self._stats.step_ended()
