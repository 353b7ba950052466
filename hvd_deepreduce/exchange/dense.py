"""Buckets that are summed as they are, by an allreduce: of tensors that are too small to be compressed."""

from __future__ import annotations

from typing import Any

from hvd_deepreduce.exchange import traffic
from hvd_deepreduce.exchange.interface import Bucket, Exchange, Pending, Rank, Started
from hvd_deepreduce.exchange.traffic import Traffic
from hvd_deepreduce.ops import arrays


class DenseExchange(Exchange):
    """One allreduce for each bucket, without residuals."""

    def start(self, rank: Rank, bucket: Bucket) -> Pending:
        rank.complete(bucket)
        rank.stats.add(encode=bucket.filling)
        handle = rank.collectives.start_sum(bucket.gradient, bucket.name)
        return _Summing(rank, bucket, handle, rank.collectives.wait_sum)


class _Summing(Started):
    __slots__ = ()

    def _decode(self, received: Any, scale: float) -> Traffic:
        gradient = self._bucket.gradient
        arrays.sum_into(gradient, [(None, arrays.move_like(received, gradient))], scale)
        ranks = self._rank.collectives.size()
        return traffic.NOTHING if self._rank.collectives.counts else traffic.allreduce(gradient.nbytes, ranks)
