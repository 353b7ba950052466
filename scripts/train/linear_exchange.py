"""The exchange of sparse gradients, as containers, without a framework: what one rank makes of the others' bytes.

``servers`` is 0 for an allgather: each rank's container goes to all, and each decodes and adds them all. Otherwise the
features are in as many ranges, each of one rank, the server. All ranks send it a container of its range; it decodes
them, adds them up, and encodes the mean again for all ranks. With one server this is the driver of SKCompress (section
7.1: decode, sum, encode); with one for each rank, a parameter server.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hvd_deepreduce import Config, SparseTensor
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.wire import frame

U8 = npt.NDArray[np.uint8]
DTYPE = np.dtype(np.float32)


class Endpoint:
    """One rank.

    Args:
        config: of both directions. With error feedback, the rank has a residual of all features, and a server another
            one of its range.
        servers: how many; 0: an allgather.

    Attributes:
        step: numbers the exchanges.
        residuals: of what this rank sends to servers, and of what it sends as a server.
    """

    def __init__(self, config: Config, rank: int, ranks: int, numel: int, servers: int) -> None:
        self.config, self.rank, self.ranks, self.servers, self.step = config, rank, ranks, servers, 0
        self.ends = [numel * (number + 1) // max(1, servers) for number in range(max(1, servers))]
        self.begins = [0, *self.ends[:-1]]
        self._pipeline = Pipeline(config)
        self.residuals: list[npt.NDArray[np.float32] | None] = [None, None]
        if config.error_feedback:
            served = self.ends[rank] - self.begins[rank] if rank < servers else 0
            self.residuals = [np.zeros(numel, np.float32), np.zeros(served, np.float32)]

    def _key(self, number: int) -> RngKey:
        return RngKey(self.config.seed, number, self.step, self.rank)

    def containers(self, gradient: SparseTensor) -> list[U8]:
        """The containers of this rank's gradient, one for each range."""
        cuts = np.searchsorted(gradient.indices, self.ends, "left")
        made, first = [], 0
        for number, (begin, end, cut) in enumerate(zip(self.begins, self.ends, cuts.tolist(), strict=True)):
            part = SparseTensor(end - begin, gradient.indices[first:cut] - np.uint32(begin), gradient.values[first:cut])
            residual = None if self.residuals[0] is None else self.residuals[0][begin:end]
            made.append(self._pipeline.encode_sparse(part, residual, self._key(number), 2))
            first = cut
        return made

    def _mean(self, joined: U8, numel: int, number: int) -> SparseTensor:
        expected = self._pipeline.expected(numel, DTYPE, self._key(number))
        containers = frame.split(joined, self.ranks, [expected])[0]
        return self._pipeline.decode_sparse(containers, numel, DTYPE, 1 / self.ranks, expected.key)

    def serve(self, joined: U8) -> U8:
        """As a server: the container of the mean of all ranks' containers of its range, which came in rank order."""
        numel = self.ends[self.rank] - self.begins[self.rank]
        mean = self._mean(joined, numel, self.rank)
        return self._pipeline.encode_sparse(mean, self.residuals[1], self._key(self.servers + self.rank), 2)

    def mean(self, joined: U8) -> SparseTensor:
        """The mean of all ranks' gradients, and the end of the exchange; ``joined`` is what all ranks have: the
        containers of all ranks, or of all servers, in their order."""
        numel = self.ends[-1]
        if not self.servers:
            mean = self._mean(joined, numel, 0)
        else:
            expected = [
                self._pipeline.expected(end - begin, DTYPE, self._key(self.servers + number))
                for number, (begin, end) in enumerate(zip(self.begins, self.ends, strict=True))
            ]
            parts = []
            containers = frame.split(joined, 1, expected)
            for begin, one, of_server in zip(self.begins, expected, containers, strict=True):
                part = self._pipeline.decode_sparse(of_server, one.numel, DTYPE, 1, one.key)
                parts.append((part.indices + np.uint32(begin), part.values))
            mean = SparseTensor(numel, *(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
        self.step += 1
        return mean


class Exchanged(NamedTuple):
    """An exchange of all ranks in one process.

    Attributes:
        mean: of the gradients, as every rank decodes it.
        up, down: bytes that all ranks send, and those of the servers' containers for all ranks; for an allgather, what
            a rank sends, times the ranks that it sends it to, counts as up.
        seconds: of the processor, for encoding, serving and decoding, on one rank of each kind, which do it at the same
            time.
    """

    mean: SparseTensor
    up: int
    down: int
    seconds: float


def exchange_all(endpoints: Sequence[Endpoint], gradients: Sequence[SparseTensor]) -> Exchanged:
    """What the ranks of a job do, one after the other."""
    ranks, servers = len(endpoints), endpoints[0].servers
    begin = time.process_time()
    sent = [one.containers(gradient) for one, gradient in zip(endpoints, gradients, strict=True)]
    seconds = (time.process_time() - begin) / ranks
    up, down = sum(part.size for parts in sent for part in parts), 0
    joined = np.concatenate([parts[0] for parts in sent])
    if servers:
        begin = time.process_time()
        served = [endpoints[n].serve(np.concatenate([parts[n] for parts in sent])) for n in range(servers)]
        seconds += (time.process_time() - begin) / servers
        joined = np.concatenate(served)
        down = ranks * joined.size
    else:
        up *= ranks - 1
    begin = time.process_time()
    mean = endpoints[0].mean(joined)
    seconds += time.process_time() - begin
    for one in endpoints[1:]:
        one.step += 1
    return Exchanged(mean, up, down, seconds)
