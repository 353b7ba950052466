"""All ranks of a job in one process: each has its residual, and sends containers that the package's pipeline makes.

A simulation gives the bytes and the result of a training, and no times.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hvd_deepreduce import Config
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.joint.densestream import DenseStream
from hvd_deepreduce.codecs.joint.stream import Stream, covered_indices
from hvd_deepreduce.codecs.sparse_tensor import SparseTensor
from hvd_deepreduce.codecs.sparsify.topk import kept_of
from hvd_deepreduce.exchange import costs, traffic
from hvd_deepreduce.exchange.mpi import densestream
from hvd_deepreduce.exchange.mpi.sum_buffer import SumBuffer
from hvd_deepreduce.exchange.mpi.transport import Program, Transport
from hvd_deepreduce.exchange.reduce_scatter import SlicedSum
from hvd_deepreduce.exchange.settings import DenseStreamExchange, ReduceScatter
from hvd_deepreduce.ops import arrays
from hvd_deepreduce.ops.densestream import add_to
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.wire import frame
from hvd_deepreduce.wire.decoding import decode_part
from tests.support.simulated_collectives import CollectiveNetwork
from tests.support.simulated_mpi import Network


class DenseRanks:
    """Ranks that exchange vectors in float32, as ``SimulatedRanks`` exchanges containers.

    Attributes:
        residuals: of each rank; empty.
        sent: bytes that each rank has sent, by a ring.
    """

    def __init__(self, ranks: int) -> None:
        self.residuals = [np.zeros(0, np.float32) for _ in range(ranks)]
        self.sent = [0] * ranks

    def mean(self, vectors: Sequence[npt.NDArray[np.float32] | None], decay: float = 1.0) -> npt.NDArray[np.float32]:
        """The mean of all ranks' vectors; None counts as zeros. ``decay`` has no effect, as there are no residuals."""
        given = np.array([vector for vector in vectors if vector is not None])
        sent = traffic.allreduce(given.nbytes // len(given), len(vectors)).sent
        self.sent = [before + sent for before in self.sent]
        total: npt.NDArray[np.float32] = given.sum(0)
        return total * np.float32(1 / len(vectors))


class SimulatedRanks:
    """Ranks that exchange vectors, gradients or updates, in containers.

    Args:
        config: of the job; its exchange must be ``allgather``, ``reduce_scatter``, or ``densestream`` with a density.
        ranks: how many.
        sizes: elements of the model's tensors. With the config's scope ``tensor``, or ``selection: tensor``, each has a
            container of its own; otherwise there is one of all of them.
        threads: of the kernels.

    Raises:
        ValueError: the config sums by an exchange over MPI, which one process cannot run, or has overrides.

    Attributes:
        residuals: of each rank, float32 ``[sum of sizes]``; zeros without error feedback.
        velocities: as ``residuals``, under the memory ``dgc``.
        exchanges: how many there were.
        sent, received: bytes of each rank, as ``stats()`` counts them.
        container_bytes: of all ranks' containers; with ``reduce_scatter``, all that was sent.
    """

    def __init__(self, config: str | Config, ranks: int, sizes: Sequence[int], threads: int = 1) -> None:
        self.config = Config.load(config)
        exchange = self.config.exchange
        if exchange.implementation is not None and getattr(exchange, "density", None) is None:
            raise ValueError(
                f"config has the exchange {exchange.name!r}; only allgather, reduce_scatter, and densestream with a "
                "density run here"
            )
        if self.config.overrides:
            raise ValueError("config has overrides, which go by the names of parameters: there are none here")
        ends = np.cumsum(sizes).tolist()
        self.numel: int = ends[-1]
        whole = self.config.scope != "tensor" and self.config.selection == "scope"
        self._parts = [(0, self.numel)] if whole else list(zip([0, *ends], ends, strict=False))
        self._pipeline = Pipeline(self.config, threads)
        self.residuals = [np.zeros(self.numel, np.float32) for _ in range(ranks)]
        self.velocities = [np.zeros(self.numel if self.config.has_velocity else 0, np.float32) for _ in range(ranks)]
        self.exchanges = 0
        self.sent = [0] * ranks
        self.received = [0] * ranks
        self.container_bytes = 0

    def mean(self, vectors: Sequence[npt.NDArray[np.float32] | None], decay: float = 1.0) -> npt.NDArray[np.float32]:
        """What every rank decodes: the mean over the ranks of what each sends of its vector and its residual.

        Args:
            vectors: of each rank, float32 ``[numel]``, contiguous; unchanged. None: the rank sends zeros, and keeps its
                residual.
            decay: factor of the residuals before the vectors are added.
        """
        ranks, pipeline = len(self.residuals), self._pipeline
        total = np.zeros(self.numel, np.float32)
        zeros = np.zeros(self.numel, np.float32) if any(vector is None for vector in vectors) else None
        residuals = [
            None if vector is None or not self.config.error_feedback else residual
            for vector, residual in zip(vectors, self.residuals, strict=True)
        ]
        for residual in residuals:
            if residual is not None:
                residual *= np.float32(decay)
        if isinstance(self.config.exchange, ReduceScatter):
            return self._sum_slices(vectors, residuals, zeros) * np.float32(1 / ranks)
        if isinstance(self.config.exchange, DenseStreamExchange):
            return self._sum_streams(vectors, residuals, zeros) * np.float32(1 / ranks)
        for number, (begin, end) in enumerate(self._parts):
            keys = [RngKey(self.config.seed, number, self.exchanges, rank) for rank in range(ranks)]
            packed = [
                pipeline.encode(
                    (zeros if vector is None else vector)[begin:end],
                    None if residual is None else residual[begin:end],
                    key,
                    version=2,
                    velocity=velocity[begin:end] if self.config.has_velocity else None,
                    ranks=ranks,
                )
                for vector, residual, velocity, key in zip(vectors, residuals, self.velocities, keys, strict=True)
            ]
            gathered = np.concatenate(packed)
            for rank, own in enumerate(packed):
                wire = traffic.allgather(own.size, gathered.size, ranks)
                self.sent[rank] += wire.sent
                self.received[rank] += wire.received
            self.container_bytes += gathered.size
            expected = pipeline.expected(end - begin, total.dtype, keys[0])
            for rank, container in enumerate(frame.split(gathered, ranks, [expected])[0]):
                support, values = decode_part(container, end - begin, rank)
                total[begin:end][slice(None) if support is None else support] += values
        self.exchanges += 1
        return total * np.float32(1 / ranks)

    def _sum_slices(
        self,
        vectors: Sequence[npt.NDArray[np.float32] | None],
        residuals: Sequence[npt.NDArray[np.float32] | None],
        zeros: npt.NDArray[np.float32] | None,
    ) -> npt.NDArray[np.float32]:
        """The sum, of which each rank adds up one slice."""
        ranks, network = len(vectors), CollectiveNetwork(len(vectors))
        programs = [
            SlicedSum(
                self._pipeline,
                ranks,
                RngKey(self.config.seed, 0, self.exchanges, rank),
                zeros if vector is None else vector,
                residual,
                self.residuals[rank] if self.config.error_feedback else None,
                self.velocities[rank] if self.config.has_velocity else None,
                self._parts if self.config.selection == "tensor" else None,
            ).steps()
            for rank, (vector, residual) in enumerate(zip(vectors, residuals, strict=True))
        ]
        total = np.zeros(self.numel, np.float32)
        network.run(programs)[0].write(total, 1.0)
        self.sent = [before + int(sent) for before, sent in zip(self.sent, network.sent, strict=True)]
        self.received = [before + int(got) for before, got in zip(self.received, network.received, strict=True)]
        self.container_bytes += int(network.sent.sum())
        self.exchanges += 1
        return total

    def _sum_streams(
        self,
        vectors: Sequence[npt.NDArray[np.float32] | None],
        residuals: Sequence[npt.NDArray[np.float32] | None],
        zeros: npt.NDArray[np.float32] | None,
    ) -> npt.NDArray[np.float32]:
        """The sum by recursive halving, with partial sums that are cut; of finite vectors."""
        settings, ranks, numel = self.config.exchange, len(vectors), self.numel
        assert isinstance(settings, DenseStreamExchange) and settings.density is not None
        codec = DenseStream(coded=settings.coded, value=settings.value, bits=settings.bits)
        parts = self._parts if self.config.selection == "tensor" else None
        keys = [RngKey(self.config.seed, 0, self.exchanges, rank) for rank in range(ranks)]
        tensors = []
        for vector, residual, key in zip(vectors, residuals, keys, strict=True):
            given = zeros if vector is None else vector
            assert given is not None
            selected = self._pipeline.select(given, residual, key, parts)
            assert selected is not None
            indices, values = selected
            if indices is None:
                indices = np.arange(numel, dtype=np.uint32)
            if settings.fill and residual is not None:
                indices = covered_indices(indices, codec.gap(numel, values.dtype))
                values = arrays.gather(residual, indices)
            tensors.append(SparseTensor(numel, indices, values))
        slices = densestream.slice_count(max(one.indices.size for one in tensors), ranks)
        bounds, cells = densestream.balanced_split(tensors, ranks * slices, cuts=True)
        total = SumBuffer(numel, np.dtype(np.float32), True, None)
        errors: list[list[Stream]] = [[] for _ in tensors]
        most = kept_of(settings.density, numel)

        def programs(transport: Transport) -> list[Program]:
            rank = transport.rank
            plan = densestream.Plan(
                codec, numel, total.dtype, bounds, slices, keys[rank], errors[rank] if residuals[rank] is not None
                else None, most,
            )  # fmt: skip
            return densestream.programs(transport, tensors[rank], plan, None if rank else total)

        network = Network(ranks)
        network.run(programs)
        for residual, tensor, lost in zip(residuals, tensors, errors, strict=True):
            if residual is not None:
                arrays.subtract_sent(residual, tensor.indices, tensor.values)
                for stream in lost:
                    add_to(stream.starts, stream.lengths, stream.values, residual)
        small = int(costs.small_collectives(ranks, *cells).beside)
        self.sent = [before + int(sent) + small for before, sent in zip(self.sent, network.sent, strict=True)]
        self.received = [before + int(got) + small for before, got in zip(self.received, network.received, strict=True)]
        self.container_bytes += int(network.sent.sum())
        self.exchanges += 1
        assert total.out is not None
        return total.out

    def dense_bytes(self, exchanges: int) -> int:
        """Bytes that a rank sends in this many dense allreduces of float32, by a ring."""
        return exchanges * traffic.allreduce(4 * self.numel, len(self.residuals)).sent
