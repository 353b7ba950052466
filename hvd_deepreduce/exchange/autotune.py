"""``exchange: auto``: the exchange that the cost model finds fastest on this job's own network.

All ranks measure once, when they are compared before the first gradient: a few small and a few large allgathers give
the latency of a message and the rate. Each rank says what it has measured and which exchanges it could run, by one more
allgather, so that all of them draw the same conclusion from the same numbers. No later step needs a message for it.

The model and its assumptions are in ``exchange/costs.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from math import ceil
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.joint.stream import CODED_BLOCK_BITS
from hvd_deepreduce.codecs.value.half import Half
from hvd_deepreduce.codecs.value.qsgd import QSGD
from hvd_deepreduce.config import Config, ConfigError
from hvd_deepreduce.exchange import costs
from hvd_deepreduce.exchange.collectives import Collectives
from hvd_deepreduce.exchange.settings import AutoExchange, DenseStreamExchange
from hvd_deepreduce.exchange.statements import refusal
from hvd_deepreduce.pipeline import Pipeline

SMALL_BYTES, LARGE_BYTES, LEAST_LARGE = 16, 1 << 22, 1 << 12
"""What a rank sends in a small allgather; what all send in a large one; and the least that a rank sends there."""
SMALL, LARGE = 7, 3
"""How many allgathers of each kind are timed, after one that is not."""
SAMPLE = 1 << 16
"""Elements of the vector that is encoded to find the bytes of an element."""
NAMES = ("allgather", "reduce_scatter", "densestream")
LEAST_BYTE = 8e-12
"""Seconds, those of 1,000 Gbit/s: what is measured below is noise, such as where ranks share their memory or the large
messages are too small."""


@dataclass(frozen=True)
class Chosen:
    """What the ranks have agreed on.

    Attributes:
        config: the job's, with the chosen exchange.
        sentence: what was chosen, and why.
    """

    config: Config
    sentence: str


def candidates(config: Config, over_mpi: bool) -> dict[str, Config]:
    """The config with each exchange that it allows; the one with ``allgather`` comes first.

    Args:
        over_mpi: whether this rank can run exchanges over MPI.
    """
    auto, value = config.exchange, config.value
    assert isinstance(auto, AutoExchange)
    values: dict[str, Any] = {"value": "raw"}
    if isinstance(value, QSGD):
        values = {"value": "qsgd", "bits": value.bits}
    elif isinstance(value, Half):
        values = {"value": value.dtype}
    settings: dict[str, dict[str, Any]] = {"allgather": {}, "reduce_scatter": {"density": auto.density}}
    if over_mpi and config.joint is None and not config.has_velocity:
        settings["densestream"] = {"density": auto.density, **values}
    found = {}
    for name, given in settings.items():
        try:
            found[name] = Config.load(config, exchange={"name": name, **given})
        except ConfigError:
            if name == "allgather":
                raise
    return found


def element_bytes(config: Config, numel: int) -> float:
    """About the bytes that each kept element of a vector takes."""
    exchange = config.exchange
    if isinstance(exchange, DenseStreamExchange):
        bits = {"raw": 32, "qsgd": exchange.bits}.get(exchange.value, 16)
        return (bits + (CODED_BLOCK_BITS if exchange.coded else 64)) / 8
    sample = np.random.default_rng(0).standard_normal(max(1, min(numel, SAMPLE)), np.float32)
    return Pipeline(config).encode(sample, None, RngKey(0, 0, 0), 2).size / costs.kept(config, sample.size)


def measured(collectives: Collectives, most: int) -> tuple[float, float]:
    """This rank's seconds for a message, and for a byte. Every rank calls it at the same time.

    Args:
        most: bytes that all ranks together send in an allgather, about.
    """
    ranks = collectives.size()

    def timed(size: int, times: int) -> float:
        data, seconds = np.zeros(size, np.uint8), []
        for _ in range(times + 1):
            begin = perf_counter()
            collectives.allgather(data, "the exchange's measurement")
            seconds.append(perf_counter() - begin)
        return median(seconds[1:])

    large = max(LEAST_LARGE, min(LARGE_BYTES, most) // ranks)
    small = timed(SMALL_BYTES, SMALL)
    more = max(0.0, timed(large, LARGE) - small)
    messages = costs.PER_COLLECTIVE * (ranks - 1)
    return small / messages, more / ((ranks - 1) * (large - SMALL_BYTES))


def choose(config: Config, collectives: Collectives, numel: int, over_mpi: bool) -> Chosen:
    """The exchange for a model of ``numel`` elements. Every rank calls it at the same time, and gets the same.

    Args:
        config: of the job; its exchange is an ``AutoExchange``.
        over_mpi: whether the adapter and this rank can run exchanges over MPI.

    Raises:
        MismatchError: a rank has said no such numbers; on all ranks.
    """
    auto, ranks = config.exchange, collectives.size()
    assert isinstance(auto, AutoExchange)
    possible = candidates(config, over_mpi and collectives.mpi_enabled() and find_spec("mpi4py") is not None)
    if ranks == 1:
        return Chosen(possible["allgather"], "exchange is auto: allgather, as there is one rank.")
    vectors = 1 if config.scope == "model" else max(1, ceil(4 * numel / config.bucket_bytes))
    length = max(1, numel // vectors)
    fixed = auto.latency is not None and auto.bandwidth is not None
    latency, byte = (0.0, 0.0) if fixed else measured(collectives, 4 * numel)
    words = [element_bytes(possible[name], length) if name in possible else 0.0 for name in NAMES]
    own = np.array([latency, byte, *words], np.float64)
    gathered = collectives.allgather(own.view(np.uint8), "the exchange's choice")
    said = np.frombuffer(gathered.tobytes(), np.float64) if gathered.size == ranks * own.nbytes else np.full(1, np.nan)
    if not np.isfinite(said).all() or said.min() < 0:
        raise refusal(0, "or another one did not say what it has measured, for exchange 'auto'")
    said = said.reshape(ranks, own.size)
    latency, byte = (float(np.median(column)) for column in said.T[:2])
    if auto.latency is not None:
        latency = 1e-6 * auto.latency
    if auto.bandwidth is not None:
        byte = 8e-9 / auto.bandwidth
    too_fast = auto.bandwidth is None and byte < LEAST_BYTE
    byte = LEAST_BYTE if too_fast else byte
    rate = "a rate that is too high to be measured" if too_fast else f"{8e-9 / byte:.3g} Gbit/s"
    times = {}
    for name, of_ranks in zip(NAMES, said.T[2:], strict=True):
        if not of_ranks.all():
            continue  # a rank cannot run it
        supports = costs.Supports(length, costs.kept(possible[name], length))
        cost = costs.expected(possible[name].exchange, ranks, supports)
        times[name] = vectors * cost.seconds(costs.Link(8 / byte, latency), float(np.median(of_ranks)))
    best = min(times, key=lambda name: times[name])
    told = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in times.items())
    how = "given" if fixed else "measured" if auto.latency is None and auto.bandwidth is None else "given and measured"
    sentence = (
        f"exchange is auto: {best}, since the model predicts {told} a step on {ranks} ranks for {numel} elements, "
        f"at {1e6 * latency:.3g} us a message and {rate} ({how})."
    )
    return Chosen(possible[best], sentence)
