"""``exchange: allgather``: every rank gets and decodes the containers of all ranks."""

from __future__ import annotations

from typing import Any

from hvd_deepreduce.exchange.interface import Bucket, Exchange, Pending, Rank, Started
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
        handle = collectives.start_allgather(packed, bucket.name)
        return _Gathering(rank, bucket, handle, collectives.wait_allgather)


class _Gathering(Started):
    __slots__ = ()

    def _decode(self, received: Any, scale: float) -> Traffic:
        collectives = self._rank.collectives
        ranks = collectives.size()
        own = bundle.sum_into(self._bucket.gradient, received, ranks, self._bucket.slices, scale)
        return Traffic(own if collectives.sends_once else (ranks - 1) * own, received.size - own)
