"""How the workers of a job combine their gradients in each step: published methods, and ours, on one flat vector.

A scheme gets the gradients of all workers, float32 ``[workers, numel]``, and returns the direction of the step,
``[numel]``. It counts the bytes that the busiest worker sends. What is told of a published method is from its paper;
what is left open there is a knob, or said in the docstring.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from simulated_ranks import SimulatedRanks
from torch import Tensor
from torch.nn import functional

from hvd_deepreduce import Config
from hvd_deepreduce.exchange import traffic

Shapes = Sequence[Sequence[int]]
FLOAT = 4
"""Bytes of a value that is not compressed."""


class Scheme(Protocol):
    """See the module. Made of the number of workers, the shapes of the model's parts, the steps of the training, and
    settings of its own.

    Attributes:
        sent: bytes that the busiest worker has sent.
    """

    sent: float

    def combine(self, gradients: Tensor) -> Tensor: ...


class Dense:
    """The mean in float32, by a ring, or a momentum of the means: m = momentum * m + mean."""

    def __init__(self, workers: int, shapes: Shapes, steps: int, momentum: float = 0.0) -> None:
        self.workers, self.sent, self.momentum = workers, 0.0, momentum
        self.velocity = torch.zeros(sum(map(math.prod, shapes)))

    def combine(self, gradients: Tensor) -> Tensor:
        self.sent += traffic.allreduce(FLOAT * gradients.shape[1], self.workers).sent
        mean = gradients.mean(0)
        if not self.momentum:
            return mean
        self.velocity = self.momentum * self.velocity + mean
        return self.velocity.clone()  # it may be clipped in place


class Containers:
    """Gradients in the package's own containers.

    Args:
        config: of the containers, as ``Config.load`` takes it.
        warm_up: of the density: pairs of an end, in shares of the steps, and of the density until then.
    """

    def __init__(
        self, workers: int, shapes: Shapes, steps: int, config: str | dict[str, Any],
        warm_up: Sequence[tuple[float, float]] = (),
    ) -> None:  # fmt: skip
        schedule = [(max(at, round(share * steps)), density) for at, (share, density) in enumerate(warm_up, 1)]
        settings = Config.load(config, **({"density_schedule": schedule} if warm_up else {}))
        self._ranks = SimulatedRanks(settings, workers, [math.prod(shape) for shape in shapes])

    @property
    def sent(self) -> float:
        return max(self._ranks.sent)

    @property
    def container_bytes(self) -> int:
        """Of all workers."""
        return self._ranks.container_bytes

    def combine(self, gradients: Tensor) -> Tensor:
        return torch.from_numpy(self._ranks.mean([gradient.numpy() for gradient in gradients]))


class PowerSGD:
    """Rank-r approximations with error feedback, Vogels, Karimireddy, Jaggi, NeurIPS 2019, algorithms 1 and 2.

    One step of the power iteration, warm-started, with Gram-Schmidt by a QR decomposition. Vectors are sent in float32.
    The momentum is the optimizer's, as where PyTorch's hook exchanges gradients; the paper steps by the mean and its
    momentum together.

    Args:
        rank: r.
    """

    def __init__(self, workers: int, shapes: Shapes, steps: int, rank: int) -> None:
        self.workers, self.shapes = workers, [tuple(shape) for shape in shapes]
        self.sizes = [math.prod(shape) for shape in shapes]
        self.errors = torch.zeros(workers, sum(self.sizes))
        generator = torch.Generator().manual_seed(0)
        self.right = [self._start(shape, rank, generator) for shape in self.shapes]
        self.sent = 0.0

    def combine(self, gradients: Tensor) -> Tensor:
        given, numbers, parts = gradients + self.errors, 0, []
        errors = self.errors.split(self.sizes, 1)
        for number, (shape, part) in enumerate(zip(self.shapes, given.split(self.sizes, 1), strict=True)):
            right = self.right[number]
            if right is None:
                parts.append(part.mean(0))
                numbers += part.shape[1]
                continue
            matrices = part.view(self.workers, shape[0], -1)
            left = torch.linalg.qr((matrices @ right).mean(0)).Q
            self.right[number] = right = (matrices.mT @ left).mean(0)
            parts.append((left @ right.T).flatten())
            torch.sub(part, parts[-1], out=errors[number])
            numbers += left.numel() + right.numel()
        self.sent += traffic.allreduce(FLOAT * numbers, self.workers).sent
        return torch.cat(parts)

    @staticmethod
    def _start(shape: tuple[int, ...], rank: int, generator: torch.Generator) -> Tensor | None:
        """The right factor of a matrix; None: it is sent as it is, since the factors are no smaller."""
        columns = math.prod(shape[1:])
        if len(shape) == 1 or rank * (shape[0] + columns) >= shape[0] * columns:
            return None
        return torch.randn(columns, rank, generator=generator)


class DeMo:
    """Peng, Quesnelle, Kingma, "DeMo: Decoupled momentum optimization", 2024, algorithm 1: momentum by the DCT.

    The momentum of each worker is m = decay * m + g. Each matrix is cut into chunks of at most ``chunk`` x ``chunk``,
    and each vector into chunks of ``chunk``; the ``top`` largest coefficients of each chunk's DCT are sent and leave
    the momentum. The direction is the sign of the sum of what all workers have sent, transformed back. A dimension
    that is longer than a chunk, and no multiple of it, is filled with zeros, as published models pad their vocabulary.

    Args:
        chunk: the side of a chunk, of a shorter dimension all of it.
        top: coefficients of a chunk.
        decay: of the momentum.
        signs: whether the sign of each coefficient is sent, in place of its value.
        bits: of a value that is sent, if it is not a sign.
        coded: whether the indices of a chunk take as many bits as there are subsets, as an entropy coder has them; if
            not, each takes the bits of a place in the chunk.
    """

    def __init__(
        self, workers: int, shapes: Shapes, steps: int, chunk: int, top: int, decay: float, signs: bool = False,
        bits: int = 32, coded: bool = False,
    ) -> None:  # fmt: skip
        self.workers, self.shapes = workers, [tuple(shape) for shape in shapes]
        self.sizes = [math.prod(shape) for shape in shapes]
        self.sides = [[min(side, chunk) for side in shape[-2:]] for shape in self.shapes]
        self.bases = {side: _cosines(side) for sides in self.sides for side in sides}
        self.momentum = torch.zeros(workers, sum(self.sizes))
        self.top, self.decay, self.coded, self.sent = top, decay, coded, 0.0
        self.signs, self.value_bits = signs, 1 if signs else bits

    def combine(self, gradients: Tensor) -> Tensor:
        self.momentum.mul_(self.decay).add_(gradients)
        parts, bits = [], 0.0
        for shape, sides, part in zip(self.shapes, self.sides, self.momentum.split(self.sizes, 1), strict=True):
            chunks = self._chunks(part, shape, sides)
            coefficients = self._turned(chunks, sides, back=False).flatten(2)
            top = min(self.top, coefficients.shape[2])
            largest = coefficients.abs().topk(top, dim=2, sorted=False).indices
            values = coefficients.gather(2, largest)
            kept = torch.zeros_like(coefficients).scatter_(2, largest, values)
            leaves = self._turned(kept.view(chunks.shape), sides, back=True)
            part -= self._joined(leaves, shape, sides)
            sent = kept.sign() if self.signs else kept
            total = self._turned(sent.sum(0, keepdim=True).view(1, *chunks.shape[1:]), sides, back=True)
            parts.append(self._joined(total, shape, sides)[0])
            length = coefficients.shape[2]
            places = math.log2(math.comb(length, top)) if self.coded else top * math.ceil(math.log2(length))
            bits += coefficients.shape[1] * (places + top * self.value_bits)
        self.sent += (self.workers - 1) * bits / 8
        return torch.cat(parts).sign()

    def _chunks(self, part: Tensor, shape: tuple[int, ...], sides: list[int]) -> Tensor:
        """``[workers, chunks, *sides]``."""
        rows, last = len(part), shape[-len(sides) :]
        ends = [end for size, side in zip(last[::-1], sides[::-1], strict=True) for end in (0, -size % side)]
        filled = functional.pad(part.view(rows, -1, *last), ends)
        if len(sides) == 1:
            return filled.view(rows, -1, sides[0])
        high, wide = filled.shape[-2] // sides[0], filled.shape[-1] // sides[1]
        return filled.view(rows, -1, high, sides[0], wide, sides[1]).transpose(3, 4).reshape(rows, -1, *sides)

    def _joined(self, chunks: Tensor, shape: tuple[int, ...], sides: list[int]) -> Tensor:
        """The opposite of ``_chunks``: ``[workers, numel]``."""
        rows = len(chunks)
        if len(sides) == 1:
            return chunks.reshape(rows, -1)[:, : shape[0]]
        high, wide = (-(-size // side) for size, side in zip(shape[-2:], sides, strict=True))
        rowed = chunks.view(rows, -1, high, wide, *sides).transpose(3, 4)
        filled = rowed.reshape(rows, -1, high * sides[0], wide * sides[1])
        return filled[..., : shape[-2], : shape[-1]].reshape(rows, -1)

    def _turned(self, chunks: Tensor, sides: list[int], back: bool) -> Tensor:
        """The orthonormal DCT-II of each chunk, or its inverse."""
        bases = [self.bases[side].T if back else self.bases[side] for side in sides]
        if len(sides) == 1:
            return chunks @ bases[0].T
        return bases[0] @ chunks @ bases[1].T


def _cosines(side: int) -> Tensor:
    """The matrix of the orthonormal DCT-II, ``[side, side]``."""
    place = torch.arange(side, dtype=torch.float64)
    matrix = torch.cos(math.pi / side * (place + 0.5) * place[:, None]) * math.sqrt(2 / side)
    matrix[0] /= math.sqrt(2)
    return matrix.float()


class OneBitMomentum:
    """The exchange of 1-bit Adam, Tang et al., ICML 2021, algorithm 1: momentum in one bit, with error feedback twice.

    In the first steps the mean gradient is exchanged in float32 and Adam runs as ever; then its second moment stays as
    it is, and the workers exchange momentum, one sign an element and one scale for each part of the model, first to
    the owner of a slice and then, compressed again, to all. The direction is Adam's step, so the optimizer is SGD
    without momentum.

    Args:
        warm: share of the steps with dense gradients; the paper has 15% to 20%.
        beta1, beta2: of Adam.
    """

    def __init__(
        self, workers: int, shapes: Shapes, steps: int, warm: float = 0.15, beta1: float = 0.9, beta2: float = 0.99
    ) -> None:
        self.sizes, self.betas = [math.prod(shape) for shape in shapes], (beta1, beta2)
        self.workers, self.numel = workers, sum(self.sizes)
        self.warm = max(1, round(warm * steps))
        self.first, self.second = torch.zeros(self.numel), torch.zeros(self.numel)
        self.errors, self.owners = torch.zeros(workers, self.numel), torch.zeros(self.numel)
        self._steps, self.sent = 0, 0.0

    def combine(self, gradients: Tensor) -> Tensor:
        beta1, beta2 = self.betas
        self._steps += 1
        if self._steps <= self.warm:
            mean = gradients.mean(0)
            self.first.mul_(beta1).add_(mean, alpha=1 - beta1)
            self.second.mul_(beta2).addcmul_(mean, mean, value=1 - beta2)
            self.sent += traffic.allreduce(FLOAT * self.numel, self.workers).sent
            return (self.first / (1 - beta1**self._steps)) / ((self.second / (1 - beta2**self._steps)).sqrt() + 1e-8)
        moments = beta1 * self.first + (1 - beta1) * gradients + self.errors
        sent = self._signs(moments)
        self.errors = moments - sent
        owned = sent.mean(0) + self.owners
        self.first = self._signs(owned[None])[0]
        self.owners = owned - self.first
        self.sent += traffic.allreduce(self.numel / 8 + FLOAT * len(self.sizes), self.workers).sent
        return self.first / ((self.second / (1 - beta2**self.warm)).sqrt() + 1e-8)

    def _signs(self, vectors: Tensor) -> Tensor:
        """Of each row, the signs times the mean magnitude of each part of the model."""
        parts = vectors.split(self.sizes, 1)
        return torch.cat([part.abs().mean(1, keepdim=True) * part.sign() for part in parts], 1)


SCHEMES: dict[str, Callable[..., Scheme]] = {
    "dense": Dense, "containers": Containers, "powersgd": PowerSGD, "demo": DeMo, "one_bit": OneBitMomentum,
}  # fmt: skip
