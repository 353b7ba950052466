"""All ranks of a job in one process: each has its residual, and sends containers that the package's pipeline makes.

A simulation gives the bytes and the result of a training, and no times.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

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

Vector = npt.NDArray[np.float32]
Sum = tuple[Vector, npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""A sum over the ranks, and the bytes that each rank has sent and received for it."""


class DenseRanks:
    """Ranks that exchange vectors in float32, as ``SimulatedRanks`` exchanges containers.

    Attributes:
        residuals: of each rank; empty.
        sent: bytes that each rank has sent, by a ring.
    """

    def __init__(self, ranks: int) -> None:
        self.residuals = [np.zeros(0, np.float32) for _ in range(ranks)]
        self.sent = [0] * ranks

    def mean(self, vectors: Sequence[Vector | None], decay: float = 1.0) -> Vector:
        """The mean of all ranks' vectors; None counts as zeros. ``decay`` has no effect, as there are no residuals."""
        given = np.array([vector for vector in vectors if vector is not None])
        sent = traffic.allreduce(given.nbytes // len(given), len(vectors)).sent
        self.sent = [before + sent for before in self.sent]
        total: Vector = given.sum(0)
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
        velocities: as ``residuals``, under a memory that has them.
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

    def mean(self, vectors: Sequence[Vector | None], decay: float = 1.0) -> Vector:
        """What every rank decodes: the mean over the ranks of what each sends of its vector and its residual.

        Args:
            vectors: of each rank, float32 ``[numel]``, contiguous; unchanged. None: the rank sends zeros, and keeps its
                residual.
            decay: factor of the residuals before the vectors are added.
        """
        exchange, ranks = self.config.exchange, len(self.residuals)
        zeros = np.zeros(self.numel, np.float32) if any(vector is None for vector in vectors) else None
        given = [zeros if vector is None else vector for vector in vectors]
        residuals = [
            None if vector is None or not self.config.error_feedback else residual
            for vector, residual in zip(vectors, self.residuals, strict=True)
        ]
        for residual in residuals:
            if residual is not None:
                residual *= np.float32(decay)
        sums = self._sum_containers
        if isinstance(exchange, ReduceScatter):
            sums = self._sum_slices
        elif isinstance(exchange, DenseStreamExchange):
            sums = self._sum_streams
        total, sent, received = sums(given, residuals)
        self.sent = [before + int(one) for before, one in zip(self.sent, sent, strict=True)]
        self.received = [before + int(one) for before, one in zip(self.received, received, strict=True)]
        self.exchanges += 1
        return total * np.float32(1 / ranks)

    def _keys(self, number: int = 0) -> list[RngKey]:
        """Of each rank, for the container with this number."""
        return [RngKey(self.config.seed, number, self.exchanges, rank) for rank in range(len(self.residuals))]

    def _sum_containers(self, vectors: list[Vector], residuals: list[Vector | None]) -> Sum:
        """Every rank decodes and adds all ranks' containers."""
        ranks, total = len(vectors), np.zeros(self.numel, np.float32)
        sent, received = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
        for number, (begin, end) in enumerate(self._parts):
            keys = self._keys(number)
            packed = [
                self._pipeline.encode(
                    vector[begin:end], None if residual is None else residual[begin:end], key, version=2,
                    velocity=velocity[begin:end] if self.config.has_velocity else None, ranks=ranks,
                )
                for vector, residual, velocity, key in zip(vectors, residuals, self.velocities, keys, strict=True)
            ]  # fmt: skip
            gathered = np.concatenate(packed)
            wire = [traffic.allgather(own.size, gathered.size, ranks) for own in packed]
            sent += [one.sent for one in wire]
            received += [one.received for one in wire]
            self.container_bytes += gathered.size
            expected = self._pipeline.expected(end - begin, total.dtype, keys[0])
            for rank, container in enumerate(frame.split(gathered, ranks, [expected])[0]):
                support, values = decode_part(container, end - begin, rank)
                total[begin:end][slice(None) if support is None else support] += values
        return total, sent, received

    def _sum_slices(self, vectors: list[Vector], residuals: list[Vector | None]) -> Sum:
        """Each rank adds up one slice."""
        network, config = CollectiveNetwork(len(vectors)), self.config
        programs = [
            SlicedSum(
                self._pipeline, len(vectors), key, vector, residual, kept if config.error_feedback else None,
                velocity if config.has_velocity else None, self._parts if config.selection == "tensor" else None,
            ).steps()
            for key, vector, residual, kept, velocity in zip(
                self._keys(), vectors, residuals, self.residuals, self.velocities, strict=True
            )
        ]  # fmt: skip
        total = np.zeros(self.numel, np.float32)
        network.run(programs)[0].write(total, 1.0)
        self.container_bytes += int(network.sent.sum())
        return total, network.sent, network.received

    def _sum_streams(self, vectors: list[Vector], residuals: list[Vector | None]) -> Sum:
        """Recursive halving, with partial sums that are cut; of finite vectors."""
        settings, ranks, numel = self.config.exchange, len(vectors), self.numel
        codec = DenseStream(coded=settings.coded, value=settings.value, bits=settings.bits)
        parts, keys = self._parts if self.config.selection == "tensor" else None, self._keys()
        tensors = []
        for vector, residual, key in zip(vectors, residuals, keys, strict=True):
            selected = self._pipeline.select(vector, residual, key, parts)
            indices, values = selected
            if indices is None:
                indices = np.arange(numel, dtype=np.uint32)
            if settings.fills and residual is not None:
                indices = covered_indices(indices, codec.gap(numel, values.dtype))
                values = arrays.gather(residual, indices)
            tensors.append(SparseTensor(numel, indices, values))
        slices = densestream.slice_count(max(one.indices.size for one in tensors), ranks)
        bounds, cells = densestream.balanced_split(tensors, ranks * slices, cuts=True)
        total, most = SumBuffer(numel, np.dtype(np.float32), True, None), kept_of(settings.density, numel)
        errors: list[list[Stream]] = [[] for _ in tensors]

        def programs(transport: Transport) -> list[Program]:
            rank = transport.rank
            lost = errors[rank] if residuals[rank] is not None else None
            plan = densestream.Plan(codec, numel, total.dtype, bounds, slices, keys[rank], lost, most)
            return densestream.programs(transport, tensors[rank], plan, None if rank else total)

        network = Network(ranks)
        network.run(programs)
        for residual, tensor, lost in zip(residuals, tensors, errors, strict=True):
            if residual is not None:
                arrays.subtract_sent(residual, tensor.indices, tensor.values)
                for stream in lost:
                    add_to(stream.starts, stream.lengths, stream.values, residual)
        small = int(costs.small_collectives(ranks, *cells).beside)
        self.container_bytes += int(network.sent.sum())
        return total.out, network.sent + small, network.received + small


Ranks = DenseRanks | SimulatedRanks
