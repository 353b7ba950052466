"""Scopes larger than a tensor: a bucket is one vector of several parameters' gradients, selected and sent as one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hvd_deepreduce.adapter import Adapter, Parameter
from hvd_deepreduce.codec import U8, Floats, Key
from hvd_deepreduce.config import Config
from hvd_deepreduce.sparse import MAX_NUMEL, SparseTensor


@dataclass
class Bucket:
    """Some parameters of the model, in its order, and a step's gradient of them.

    Attributes:
        name: of its exchange; no other bucket of the job has it, another DeepReduce's neither.
        number: the parameter of its containers' keys; buckets are sent in the order of their numbers.
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
                self.part(name)[:] = 0

    def took(self, name: str) -> None:
        """The member's sum was taken out; with the last one the bucket is ready for the next step."""
        self.taken.add(name)
        if self.taken >= self.came:
            self.came.clear()
            self.taken.clear()
            self.pending, self.summed = None, False


def layout(parameters: Sequence[tuple[str, int, np.dtype[Any]]], limit: int | None) -> list[Bucket]:
    """Buckets of all parameters, given as (name, numel, dtype) in the model's order.

    Gradients come in about the model's reverse order, so the first bucket holds its last parameters. A bucket ends
    where it would pass ``limit`` bytes (None: no limit), 2^32 - 1 elements, or change its dtype.
    """
    buckets: list[list[tuple[str, int, np.dtype[Any]]]] = []
    for parameter in reversed(parameters):
        _, numel, dtype = parameter
        last = buckets[-1] if buckets else []
        held = sum(size for _, size, _ in last)
        whole = held + numel > MAX_NUMEL or (limit is not None and (held + numel) * dtype.itemsize > limit)
        if not last or whole or last[0][2] != dtype:
            buckets.append([])
        buckets[-1].insert(0, parameter)
    return [
        Bucket(
            f"bucket.{some[0][0]}", number, [name for name, _, _ in some], [size for _, size, _ in some], some[0][2]
        )
        for number, some in enumerate(buckets)
    ]


class BucketedAdapter(Adapter):
    """An adapter that can send buckets, by Horovod's allgather or by an exchange over mpi4py."""

    def __init__(
        self, config: str | Path | Mapping[str, Any] | Config | None, process_set: Any, settings: Mapping[str, Any]
    ) -> None:
        super().__init__(config, process_set, settings)
        self._buckets: list[Bucket] = []
        self._bucket_by_name: dict[str, Bucket] = {}
        self._started = 0
        self._queue: Any = None

    @abstractmethod
    def _trained(self) -> list[tuple[str, int, np.dtype[Any]]]:
        """(name, numel, dtype to accumulate in) of all parameters whose gradients can come, in the model's order."""

    @abstractmethod
    def _start_allgather(self, packed: U8, name: str) -> Any:
        """Starts an allgather of a container; the name is unique within a step."""

    @abstractmethod
    def _wait_allgather(self, pending: Any) -> U8:
        """Its result."""

    @abstractmethod
    def _mpi_ranks(self) -> list[int] | None:
        """The process set's ranks in MPI's world; None: all of them.

        Raises:
            RuntimeError: the job does not run on MPI.
        """

    def set_config(
        self, config: str | Path | Mapping[str, Any] | Config | None = None, /, **settings: Any
    ) -> None:
        """As ``Adapter.set_config``."""
        super().set_config(config, **settings)
        self._buckets = []

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As ``Adapter.load_state_dict``."""
        super().load_state_dict(state)
        self._buckets = []

    def _bucket_of(self, parameter: Parameter) -> Bucket:
        """The parameter's bucket. A step's first gradient lays all of them out, where a parameter has none yet."""
        if not self._in_flight:
            trained = self._trained()
            if not self._buckets or any(name not in self._bucket_by_name for name, _, _ in trained):
                limit = self._config.bucket_bytes if self._config.scope == "bucket" else None
                self._buckets = layout(trained, limit)
                self._bucket_by_name = {name: bucket for bucket in self._buckets for name in bucket.members}
                self._started = 0
        bucket = self._bucket_by_name[parameter.name]
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
        while self._started < len(self._buckets) and self._buckets[self._started].full:
            self._start(self._buckets[self._started])

    def _start(self, bucket: Bucket) -> None:
        self._started += 1
        if not bucket.came:
            return
        bucket.clear_absent()
        config, pipeline = self._config, self._ready()
        key = Key(config.seed, bucket.number, bucket.step, self._process_set.rank())
        residual = None
        if config.error_feedback:
            residual = self._memory.joined(bucket.members, bucket.sizes, bucket.dtype, bucket.gradient)
        parts = bucket.parts if config.selection == "tensor" else None
        if config.exchange.name == "allgather":
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

        bucket.pending = self._exchange_queue().submit(config.exchange, select, bucket.gradient, key)

    def _exchange_queue(self) -> Any:
        if self._queue is None:
            ranks = self._mpi_ranks()
            # It needs mpi4py, which a job with the allgather exchange may not have.
            from hvd_deepreduce.exchange.queue import ExchangeQueue

            self._queue = ExchangeQueue(ranks)
        return self._queue

    def _sum_bucket(self, bucket: Bucket) -> None:
        """Makes ``bucket.gradient`` the ranks' sum. The first call of a step sends the buckets that are not full."""
        while self._started < len(self._buckets):
            self._start(self._buckets[self._started])
        if bucket.summed:
            return
        if self._config.exchange.name == "allgather":
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
            self._started = 0
            self._stats.step_ended()
