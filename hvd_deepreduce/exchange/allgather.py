"""``exchange: allgather``: every rank gets and decodes the containers of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvd_deepreduce.exchange.interface import Bucket, Exchange, Pending, Rank
from hvd_deepreduce.exchange.traffic import Traffic
from hvd_deepreduce.pipeline import bundle


class AllgatherExchange(Exchange):
    """One allgather of containers for each bucket."""

    def start(self, rank: Rank, bucket: Bucket) -> Pending:
        residual, velocity = rank.complete(bucket)
        collectives = rank.collectives
        with rank.stats.span("encode", bucket.name, bucket.filling):
            packed = bundle.encode(
                bucket.gradient, residual, velocity, bucket.slices, collectives.size(), bucket.finite
            )
        return _Gathering(rank, bucket, collectives.start_allgather(packed, bucket.name))


class _Gathering(Pending):
    __slots__ = ("_bucket", "_handle", "_rank")

    def __init__(self, rank: Rank, bucket: Bucket, handle: Any) -> None:
        self._rank, self._bucket, self._handle = rank, bucket, handle

    def result(self, scale: float) -> None:
        rank, bucket = self._rank, self._bucket
        span, collectives = rank.stats.span, rank.collectives
        with span("wait", bucket.name):
            gathered = collectives.wait_allgather(self._handle)
        ranks = collectives.size()
        with span("decode", bucket.name) as decoding:
            try:
                own = bundle.sum_into(bucket.gradient, gathered, ranks, bucket.slices, scale)
            except Exception as error:
                rank.note_failure(error)
                raise
            decoding.wire = Traffic((ranks - 1) * own, gathered.size - own)

    def add_done_callback(self, call: Callable[[Any], object]) -> None:
        self._handle.add_done_callback(call)
