"""Bytes, times and errors of codecs and of whole configs on one vector, on one thread unless a config says otherwise.

Times are medians of runs in turn, so that a machine that becomes slower does so for all; a first run is not counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from hvd_deepreduce.codecs import interfaces
from hvd_deepreduce.codecs.interfaces import U32, Floats, IndexCodec, RngKey, ValueCodec
from hvd_deepreduce.config import Config
from hvd_deepreduce.engine import BucketLayout, Member, Parameter, small
from hvd_deepreduce.engine.pipelines import Pipelines
from hvd_deepreduce.pipeline import Pipeline, bundle
from hvd_deepreduce.pipeline.bundle import Slice
from hvd_deepreduce.wire.decoding import unordered

KEY = RngKey(0, 0, 0)


def timed(*functions: Callable[[], Any], runs: int = 9, before: Callable[[], Any] | None = None) -> list[float]:
    """The median seconds of each function. The functions run in turn.

    Args:
        runs: that are counted, of each function.
        before: is called before each of them, and not timed.
    """
    seconds: list[list[float]] = [[] for _ in functions]
    for _ in range(runs + 1):
        for number, function in enumerate(functions):
            if before is not None:
                before()
            begin = time.perf_counter()
            function()
            seconds[number].append(time.perf_counter() - begin)
    return [median(one[1:]) for one in seconds]


def entropy_bits(d: int, r: int) -> float:
    """log2 C(d, r): the bits of the support of r of d elements, where each support is as likely as any other."""
    return (math.lgamma(d + 1) - math.lgamma(r + 1) - math.lgamma(d - r + 1)) / math.log(2) if 0 < r < d else 0.0


@dataclass
class Trial:
    """One codec applied to one selection.

    Attributes:
        encode, decode: the calls to time.
        size: bytes of the section, and of the order if there is one.
        support: the indices that a receiver decodes.
        error: L2 norm of the lost part, relative to the values.
    """

    encode: Callable[[], Any]
    decode: Callable[[], Any]
    size: int
    support: U32
    error: float


def trial(codec: Any, indices: U32, values: Floats, d: int) -> Trial:
    """Encodes with an index, value or joint codec, and returns both calls, ready to be timed."""
    count, support, beside = indices.size, indices, 0
    lost: Any = 0.0
    if isinstance(codec, IndexCodec):
        encode: Callable[[], Any] = partial(codec.encode, indices, d, KEY)
        section, support = encode()
        decode: Callable[[], Any] = partial(codec.decode, section, d, support.size, KEY)
    elif isinstance(codec, ValueCodec):
        encode = partial(codec.encode, values, indices, KEY)
        section, order = encode()
        decode = partial(codec.decode, section, count, indices, values.dtype, KEY)
        beside = 0 if order is None else (count * (count - 1).bit_length() + 7) // 8
        lost = unordered(decode(), order) - values
    else:
        encode = partial(codec.encode, indices, values, d, KEY)
        section, support = encode()
        decode = partial(codec.decode, section, d, support.size, False, values.dtype, KEY)
        got, decoded = decode()
        lost = np.zeros(d, values.dtype)
        lost[indices] = values
        lost[got] -= decoded
    return Trial(encode, decode, section.size + beside, support, _relative(lost, values))


def _relative(lost: Any, whole: Floats) -> float:
    """The L2 norm of what is lost, relative to that of the whole; 0 of zeros."""
    lost_norm, norm = (float(np.linalg.norm(np.asarray(one, np.float64))) for one in (lost, whole))
    return lost_norm / (norm or 1.0)


def all_codecs() -> Iterator[tuple[str, str, Any]]:
    """(kind, name, codec with default settings) of every codec that a container can name."""
    for kind in ("index", "value", "joint"):
        for name, codec in sorted(getattr(interfaces, f"{kind}_codecs").by_name.items()):
            if name != "auto":
                yield kind, name, codec()


class WholeConfig:
    """What one rank does to one gradient under a config, in the containers that a job would send.

    Args:
        config: with containers of its own, that is, not one whose exchange encodes by itself. Of a schedule, the last
            density counts.
        names, sizes: of the parameters.
        vector: float32 ``[sum of sizes]``; the residual is zero before it. It does not change.

    Raises:
        ValueError: the config's exchange encodes by itself, over MPI; or all parameters go uncompressed.

    Attributes:
        size: bytes of the rank's message, with those of small tensors that go uncompressed beside it.
        error: L2 norm of what a receiver lacks, relative to the vector. With error feedback it stays in the residual.
    """

    def __init__(self, config: Config, names: Sequence[str], sizes: Sequence[int], vector: Floats) -> None:
        if config.exchange.implementation is not None:
            raise ValueError(
                f"its exchange {config.exchange.name!r} encodes by itself, in messages over MPI, so that there is no "
                "container to measure"
            )
        self.config, self._vector = config, vector
        self._residual = np.zeros_like(vector)
        self._velocity = np.zeros_like(vector) if config.has_velocity else None
        self._out = np.zeros_like(vector)
        parts, alone = _divided(config, names, sizes)
        step = config.density_schedule.end if config.density_schedule else 0
        self._slices = [
            Slice(pipeline, part, RngKey(config.seed, number, step)) for number, (pipeline, part) in enumerate(parts)
        ]
        if not parts:
            raise ValueError("all parameters are so small that they go uncompressed, so no container is made")
        self._message = self.encode()
        self.size = self._message.size + sum(4 * (end - begin) for begin, end in alone)
        self.decode()
        for begin, end in alone:
            self._out[begin:end] = vector[begin:end]
        self.error = _relative(vector - self._out, vector)

    def reset(self) -> None:
        """Clears what ``encode`` has left in the residual, so that the next call selects the same."""
        self._residual.fill(0)
        if self._velocity is not None:
            self._velocity.fill(0)

    def encode(self) -> Any:
        """Accumulates, selects, encodes, and subtracts what is sent."""
        return bundle.encode(self._vector, self._residual, self._velocity, self._slices, 1, False)

    def decode(self) -> None:
        """Decodes one rank's message and adds it up."""
        bundle.sum_into(self._out, self._message, 1, self._slices, 1.0)


Part = tuple[int, int]
"""(begin, end) of elements in a vector."""


def _divided(
    config: Config, names: Sequence[str], sizes: Sequence[int]
) -> tuple[list[tuple[Pipeline, Part]], list[Part]]:
    """What has containers of its own, each with its pipeline; and what is so small that it goes uncompressed."""
    pipelines = Pipelines(config, 1)
    ends = np.cumsum(sizes).tolist()
    tensors: list[Part] = list(zip([0, *ends], ends, strict=False))
    if config.scope == "tensor" or config.selection == "tensor":
        each = [(pipelines.of(name), part) for name, part in zip(names, tensors, strict=True)]
        alone = [part for pipeline, part in each if small.uncompressed(pipeline, part[1] - part[0], 4)]
        return [one for one in each if one[1] not in alone], alone
    if config.scope == "model":
        return [(pipelines.default, (0, ends[-1]))], []
    members = [Member(Parameter(str(number), number, (size,), "float32"), size) for number, size in enumerate(sizes)]
    buckets = [bucket.members for bucket in BucketLayout(members, config.bucket_bytes).buckets]
    return [(pipelines.default, (tensors[of[0].number][0], tensors[of[-1].number][1])) for of in buckets], []
