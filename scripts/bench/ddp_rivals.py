"""Other ways to average gradients, as hooks of DDP, for bench_ddp.py. Each is what its source describes, and no more.

``Rival.average`` gets a bucket of gradients, float32 ``[n]``, and replaces it by the mean over the ranks of what each
rank sends of it. Those that send a part of it keep the rest in a residual for each bucket.
"""

# Without ``from __future__ import annotations``: DDP compares the hook's annotations with the types.

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import zstandard
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.sparse_tensor import SparseTensor
from hvd_deepreduce.codecs.value.quantile import Quantile
from hvd_deepreduce.ops import bits, select

Vector = npt.NDArray[np.float32]
LEAST_START = 2
"""Iterations without compression that PowerSGD must have, since DDP divides its buckets anew after the first. Residuals
of buckets need them too."""


class Rival(ABC):
    """A way to average, with a residual of each bucket, by its number."""

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.ranks = dist.get_world_size(group)
        self.residuals: dict[int, Vector] = {}

    def residual(self, number: int, gradient: Vector) -> Vector:
        """That of a bucket."""
        return self.residuals.setdefault(number, np.zeros_like(gradient))

    def gathered(self, data: bytes) -> list[bytes]:
        """All ranks' bytes, of any length: they are padded to the longest."""
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.ranks)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self.group)
        most = max(int(size) for size in sizes)
        own = torch.zeros(most, dtype=torch.uint8)
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        padded = [torch.empty_like(own) for _ in range(self.ranks)]
        dist.all_gather(padded, own, group=self.group)
        return [one.numpy()[: int(size)].tobytes() for one, size in zip(padded, sizes, strict=True)]

    @abstractmethod
    def average(self, number: int, step: int, gradient: Vector) -> None:
        """Replaces a bucket, float32 ``[n]``, by the mean."""


class OverMpi(Rival):
    """The top-k of a bucket, at a density, summed by an ``allreduce`` of the package over mpi4py, with settings."""

    def __init__(self, group: Any, allreduce: Callable[..., Any], density: float, **settings: Any) -> None:
        super().__init__(group)
        self.allreduce, self.density, self.settings = allreduce, density, settings

    def average(self, number: int, step: int, gradient: Vector) -> None:
        from mpi4py import MPI

        comm, residual = MPI.COMM_WORLD, self.residual(number, gradient)
        indices, values = select.topk(residual, gradient, max(1, round(self.density * gradient.size)))
        tensor, key = SparseTensor(gradient.size, indices, values), RngKey(0, number, step)
        self.allreduce(comm, tensor, out=gradient, scale=1 / comm.size, residual=residual, key=key, **self.settings)


class TorchTopK(Rival):
    """``torch.topk`` and two allgathers, of float32 values and of the int64 indices that ``torch.topk`` returns, with a
    residual: as GRACE does it (Xu et al., ICDCS 2021), for each bucket in place of each tensor."""

    def __init__(self, group: Any, density: float) -> None:
        super().__init__(group)
        self.density = density

    def average(self, number: int, step: int, gradient: Vector) -> None:
        mean, residual = torch.from_numpy(gradient), torch.from_numpy(self.residual(number, gradient))
        residual += mean
        _, indices = torch.topk(residual.abs(), max(1, round(self.density * gradient.size)), sorted=False)
        values = residual[indices]
        residual[indices] = 0
        all_values = [torch.empty_like(values) for _ in range(self.ranks)]
        all_indices = [torch.empty_like(indices) for _ in range(self.ranks)]
        dist.all_gather(all_values, values, group=self.group)
        dist.all_gather(all_indices, indices, group=self.group)
        mean.zero_()
        for at, some in zip(all_indices, all_values, strict=True):
            mean.index_add_(0, at, some)
        mean /= self.ranks


class Zstd(Rival):
    """The bytes of the bucket, compressed by zstd, and an allgather. Nothing is lost."""

    def __init__(self, group: Any = None, level: int = 1) -> None:
        super().__init__(group)
        self.level = level

    def average(self, number: int, step: int, gradient: Vector) -> None:
        sent = zstandard.ZstdCompressor(level=self.level).compress(gradient.tobytes())
        total = np.zeros_like(gradient)
        for one in self.gathered(sent):
            total += np.frombuffer(zstandard.ZstdDecompressor().decompress(one), np.float32)
        np.divide(total, np.float32(self.ranks), out=gradient)


class SparseLoCoWire(Rival):
    """SparseLoCo's wire format (Sarfi et al., 2025): the 64 largest of each 4,096 elements, 12 bits for the place of
    each in its chunk, 2 bits for its value, and a table of 4 float32; with a residual. SparseLoCo exchanges updates of
    many local steps; here each step's gradient travels in its format."""

    CHUNK, KEPT, BITS = 4096, 64, 12
    VALUES = Quantile(buckets=4, splits="lloyd")

    def average(self, number: int, step: int, gradient: Vector) -> None:
        chunks = -(-gradient.size // self.CHUNK)
        padded = np.zeros(chunks * self.CHUNK, np.float32)
        padded[: gradient.size] = gradient
        residual = self.residual(number, padded)
        indices, _ = select.topk_of_chunks(residual, padded, self.CHUNK, self.KEPT, self.KEPT)
        if indices.size < chunks * self.KEPT:  # zeros are sent too: the format has as many of each chunk
            largest = np.argpartition(np.abs(residual.reshape(chunks, -1)), -self.KEPT)[:, -self.KEPT :]
            indices = np.sort(largest + self.CHUNK * np.arange(chunks)[:, None], axis=None).astype(np.uint32)
        key = RngKey(0, number, step)
        section, _ = self.VALUES.encode(residual[indices], indices, key)
        residual[indices] -= self.VALUES.decode(section, indices.size, indices, residual.dtype, key)
        places = bits.pack(indices % self.CHUNK, self.BITS)
        total = np.zeros_like(padded)
        begins = np.repeat(self.CHUNK * np.arange(chunks, dtype=np.uint32), self.KEPT)
        for one in self.gathered(places.tobytes() + section.tobytes()):
            read = np.frombuffer(one, np.uint8)
            at = begins + bits.unpack(read[: places.size].copy(), begins.size, self.BITS, np.uint32)
            total[at] += self.VALUES.decode(read[places.size :].copy(), begins.size, at, total.dtype, key)
        np.divide(total[: gradient.size], np.float32(self.ranks), out=gradient)


class RivalState:
    """Of ``rival_hook``: the first ``start`` iterations are dense, at least ``LEAST_START``."""

    def __init__(self, rival: Rival, start: int) -> None:
        self.rival, self.start, self.step = rival, max(LEAST_START, start), 0
        self._thread = ThreadPoolExecutor(1, "rival")

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown()

    def submit(self, number: int, step: int, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Averages a bucket on a thread beside the backward pass, after those before it."""
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()

        def average() -> None:
            try:
                self.rival.average(number, step, buffer.numpy())
                future.set_result(buffer)
            except Exception as error:
                future.set_exception(error)

        self._thread.submit(average)
        return future


def rival_hook(state: RivalState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages buckets by ``state.rival``."""
    step = state.step
    state.step += bucket.is_last()
    if step < state.start:
        return default_hooks.allreduce_hook(state.rival.group, bucket)
    return state.submit(bucket.index(), step, bucket.buffer())
