"""Measures this machine for ``prediction.py``: its codecs, its memory and its network stack, in about a second each.

All ranks of a host may measure at the same time: then the figures contain what they cost each other.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from threading import Thread
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

import numpy as np

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.config import Config
from hvd_deepreduce.exchange import costs
from hvd_deepreduce.exchange.costs import Link
from hvd_deepreduce.ops import half
from hvd_deepreduce.ops.types import F32
from hvd_deepreduce.pipeline import Pipeline, bundle
from hvd_deepreduce.tools.advise.prediction import CodecSpeed, Machine, buckets
from hvd_deepreduce.tools.measuring import timed

if TYPE_CHECKING:
    from hvd_deepreduce.tools.ranks import Ranks

MOST = 1 << 25
"""Elements of a vector that is measured; times of longer ones are proportional."""
BLOCK = 1 << 21
"""Elements of a generated gradient that differ."""
WARM, TIMED = 2, 5
"""Repetitions: residuals fill during the first ones."""
FEW, MANY = 1, 4
"""Containers that are decoded together, to find the time of each."""
STREAM, PIECE = 1 << 26, 1 << 20
"""Bytes that go through the network stack, and that are given to it at once."""
LEAST_SECONDS = 0.05
"""A transfer that takes less is repeated with more bytes."""
SMALL, SMALL_TIMES = 16, 15
LARGE, LARGER, LARGE_TIMES = 1 << 22, 1 << 25, 3
"""Bytes of the collectives that measure a link, and how often they are timed."""


def generated(numel: int, seed: int) -> F32:
    """A heavy-tailed gradient: normal numbers, times a log-normal scale for each element; float32 ``[numel]``. It
    repeats after ``BLOCK`` elements."""
    rng, size = np.random.default_rng(seed), min(numel, BLOCK)
    vector: F32 = np.exp(rng.standard_normal(size, np.float32)) * rng.standard_normal(size, np.float32)
    return np.resize(vector, numel)


def shortened(sizes: Sequence[int], most: int = MOST) -> list[int]:
    """Tensors of a model that has ``most`` elements at most, in the same proportions."""
    total = sum(sizes)
    return list(sizes) if total <= most else [max(1, size * most // total) for size in sizes]


def _seconds(call: Callable[[], object], times: int = TIMED) -> float:
    return timed(call, runs=times)[0]


def machine(numel: int) -> Machine:
    """The speed of the memory and of conversions, on vectors of ``numel`` float32."""
    vector = generated(min(numel, MOST), 0)
    other = np.empty_like(vector)
    section = half.encode(vector, False)
    copy = _seconds(lambda: np.copyto(other, vector))
    there = _seconds(lambda: half.encode(vector, False))
    back = _seconds(lambda: half.decode(section, vector.size))
    return Machine(copy / vector.nbytes, (there + back) / vector.size)


def gradients(sizes: Sequence[int]) -> list[F32]:
    """Generated gradients of a model, for ``codec``; not longer than that needs."""
    return [generated(sum(shortened(sizes)), seed) for seed in (0, 1)]


def codec(config: Config, sizes: Sequence[int], vectors: Sequence[F32], threads: int = 1) -> CodecSpeed:
    """The speed of a config's encoder and decoder. Of a schedule, the last density counts.

    Args:
        sizes: elements of the model's tensors.
        vectors: gradients of the model, float32, as long as it or as ``gradients``; of a longer one, the beginning of
            each tensor is encoded. They take turns. One alone is encoded into an empty residual each time: it is an
            accumulator.
        threads: of the kernels.
    """
    parts = shortened(sizes)
    numel, scale = sum(parts), sum(sizes) / sum(parts)
    if vectors[0].size > numel:
        begins = np.cumsum([0, *sizes]).tolist()
        begun = list(zip(begins, parts, strict=False))
        vectors = [np.concatenate([one[begin : begin + part] for begin, part in begun]) for one in vectors]
    together = parts
    if config.scope != "tensor" and config.selection == "scope":
        together = buckets(parts, None if config.scope == "model" else config.bucket_bytes)[::-1]
    ends = np.cumsum([0, *together]).tolist()
    pieces = list(zip(ends, ends[1:], strict=False))
    last = config.density_schedule.end if config.density_schedule else 0
    pipeline = Pipeline(config, threads)
    residual = np.zeros(numel, np.float32) if config.error_feedback else None
    velocity = np.zeros(numel, np.float32) if config.has_velocity else None
    seconds = []
    for step in range(WARM + TIMED):
        if residual is not None and len(vectors) == 1:
            residual.fill(0)
        slices = [bundle.Slice(pipeline, piece, RngKey(0, number, last + step)) for number, piece in enumerate(pieces)]
        vector = vectors[step % len(vectors)]
        begin = perf_counter()
        own = bundle.encode(vector, residual, velocity, slices, 1, False)
        seconds.append(perf_counter() - begin)
    kept = sum(costs.kept(config, end - begin) for begin, end in pieces)
    out = np.empty(numel, np.float32)
    few, many = (
        _seconds(partial(bundle.sum_into, out, np.concatenate([own] * count), count, slices, 1 / count))
        for count in (FEW, MANY)
    )
    each = max(0.0, many - few) / (MANY - FEW)
    return CodecSpeed(
        scale * median(seconds[WARM:]), scale * max(0.0, few - FEW * each), scale * each, scale * own.size,
        round(scale * kept),
    )  # fmt: skip


def stack() -> float:
    """Processor seconds for a byte that is sent and one that is received by TCP, over this host's loopback."""
    data, into = bytes(PIECE), bytearray(PIECE)
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()

    def send(pieces: int) -> None:
        for _ in range(pieces):
            sender.sendall(data)

    def seconds(pieces: int) -> float:
        thread = Thread(target=send, args=(pieces,))
        begin = process_time()
        thread.start()
        left = pieces * PIECE
        while left:
            left -= receiver.recv_into(into, min(left, PIECE))
        thread.join()
        return process_time() - begin

    with sender, receiver:
        seconds(STREAM // PIECE // 8)
        return median(seconds(STREAM // PIECE) for _ in range(3)) / STREAM


def link(collectives: Ranks, sharing: float = 1.0) -> Link:
    """Measures the link between the ranks: its latency with small allgathers, its rate with large allreduces. Every
    rank calls it at the same time, and gets the same.

    Args:
        sharing: how many ranks share a core.
    """
    ranks = collectives.ranks

    def slowest(seconds: float) -> float:
        return float(collectives.slowest(np.array([seconds]))[0])

    small = np.zeros(SMALL, np.uint8)
    latency = slowest(_seconds(lambda: collectives.allgather(small), SMALL_TIMES)) / (ranks - 1)

    def large(size: int, dtype: type[np.floating[Any]] = np.float32) -> tuple[float, float]:
        """Seconds, and processor seconds, of an allreduce."""
        data = np.zeros(size // np.dtype(dtype).itemsize, dtype)
        collectives.allreduce(data)
        begin = process_time()
        seconds = slowest(_seconds(lambda: collectives.allreduce(data), LARGE_TIMES))
        return seconds, slowest(process_time() - begin) / (LARGE_TIMES + 1)

    size = LARGE
    seconds, cpu = large(size)
    if seconds < LEAST_SECONDS:
        size = LARGER
        seconds, cpu = large(size)
    cost = costs.dense(ranks, size)
    seconds = max(seconds - cost.messages * latency, seconds / 2)
    rate = 8 * cost.words / seconds
    if not collectives.on_torch:
        return Link(rate, latency, stack())
    _, half_cpu = large(size, np.float16)
    return Link(rate, latency, min(cpu, seconds / sharing) / cost.words, half_cpu / cost.words)
