"""``exchange: allgather``: every rank gets and decodes the containers of all ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from hvd_deepreduce.codecs.interfaces import U8
from hvd_deepreduce.exchange import traffic
from hvd_deepreduce.exchange.collectives import Collectives
from hvd_deepreduce.exchange.failures import ERROR_HEADER, error_in, told
from hvd_deepreduce.exchange.interface import Bucket, Exchange, Pending, Rank, Started
from hvd_deepreduce.exchange.traffic import Traffic
from hvd_deepreduce.ops import arrays
from hvd_deepreduce.pipeline import Pipeline, bundle
from hvd_deepreduce.wire.standalone import ContainerError

_TOO_LARGE = "the ranks' containers"
HEADER = 16
"""Bytes of a container beside its elements, at most, where it is uncompressed."""


class AllgatherExchange(Exchange):
    """One allgather of containers for each bucket.

    Where the library limits an allgather, a bucket may be too large for it: uncompressed, as that of a gradient with
    NaN or infinity is. The ranks add up the sizes of its containers then, and start the allgather when the result is
    asked for, if the library can take it.
    """

    def in_one_pass(self, pipeline: Pipeline, dtype: np.dtype[Any]) -> bool:
        return pipeline.takes_fused(dtype)

    def most_bytes(self, collectives: Collectives) -> int | None:
        limit = collectives.most_bytes
        return None if limit is None else limit // collectives.size() // 16 * 15  # a part for headers

    def start(self, rank: Rank, bucket: Bucket) -> Pending:
        residual, velocity = rank.complete(bucket)
        collectives, ranks = rank.collectives, rank.collectives.size()
        gradient = bucket.gradient if bucket.pieces is None else bucket.pieces
        with rank.stats.span("encode", bucket.name, bucket.filling):
            into = rank.next_residual(bucket, residual)
            packed = bundle.encode(gradient, residual, velocity, bucket.slices, ranks, bucket.finite, into)
            if into is not None and residual is not None:
                rank.replace_residual(bucket, residual, into)
        limit = collectives.most_bytes
        if limit is not None:
            if ranks * (bucket.gradient.nbytes + HEADER * len(bucket.slices)) > limit:  # on all ranks alike
                handle = collectives.start_sum(np.array([packed.size], np.float64), f"{bucket.name}.bytes")
                rank.stats.add(wire=traffic.allreduce(8, ranks))
                return _Gathering(rank, bucket, handle, partial(_gathered, collectives, packed, bucket.name, limit))
            if ranks * packed.size > limit:  # by a codec that needs more bytes than the gradient has
                error = _too_large(bucket.name, ranks * packed.size, limit)
                packed = arrays.move_like(told(error, collectives.rank()), packed)  # the others may wait already
        return _Gathering(rank, bucket, collectives.start_allgather(packed, bucket.name), collectives.wait_allgather)


class _Gathering(Started):
    __slots__ = ()

    def _decode(self, received: Any, scale: float) -> Traffic:
        collectives = self._rank.collectives
        ranks = collectives.size()
        try:
            own = bundle.sum_into(self._bucket.gradient, received, ranks, self._bucket.slices, scale)
        except ContainerError as error:
            raise _told_in(received) or error from None
        return traffic.NOTHING if collectives.counts else Traffic((ranks - 1) * own, received.size - own)


def _gathered(collectives: Collectives, packed: U8, name: str, limit: int, counting: Any) -> U8:
    """All ranks' containers, once their sizes are known.

    Raises:
        ContainerError: the library cannot take them; on all ranks. Nothing was sent.
    """
    collectives.wait_step_check()
    size = int(collectives.wait_sum(counting)[0])
    if size > limit:
        raise _too_large(name, size, limit)
    return collectives.wait_allgather(collectives.start_allgather(packed, name))


def _told_in(received: U8) -> ContainerError | None:
    """The error that a rank has sent in place of its containers; None: there is none."""
    begin = arrays.to_host(received).tobytes().find(_TOO_LARGE.encode())
    return None if begin < 0 else error_in(received[begin - ERROR_HEADER :])


def _too_large(name: str, size: int, limit: int) -> ContainerError:
    return ContainerError(
        f"{_TOO_LARGE} of {name} have {size} bytes, and one allgather takes at most {limit}: set scope to "
        "'bucket', lower the density, or set exchange to 'reduce_scatter', whose bytes do not grow with the ranks. "
        "(A gradient with NaN or infinity is sent uncompressed.)"
    )
