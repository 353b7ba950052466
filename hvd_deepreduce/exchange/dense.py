"""Buckets that are summed as they are, by an allreduce: of tensors that are too small to be compressed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvd_deepreduce.exchange import traffic
from hvd_deepreduce.exchange.interface import Bucket, Exchange, Pending, Rank
from hvd_deepreduce.ops import arrays


class DenseExchange(Exchange):
    """One allreduce for each bucket, without residuals."""

    def start(self, rank: Rank, bucket: Bucket) -> Pending:
        rank.complete(bucket)
        handle = rank.collectives.start_sum(bucket.gradient, bucket.name)
        rank.stats.add(wire=traffic.allreduce(bucket.gradient.nbytes, rank.collectives.size()), encode=bucket.filling)
        return _Summing(rank, bucket, handle)


class _Summing(Pending):
    __slots__ = ("_bucket", "_handle", "_rank")

    def __init__(self, rank: Rank, bucket: Bucket, handle: Any) -> None:
        self._rank, self._bucket, self._handle = rank, bucket, handle

    def result(self, scale: float) -> None:
        rank, bucket = self._rank, self._bucket
        with rank.stats.span("wait", bucket.name):
            total = rank.collectives.wait_sum(self._handle)
        with rank.stats.span("decode", bucket.name):
            arrays.sum_into(bucket.gradient, [(None, arrays.move_like(total, bucket.gradient))], scale)

    def add_done_callback(self, call: Callable[[Any], object]) -> None:
        self._handle.add_done_callback(call)
