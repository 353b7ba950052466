"""The time of an exchange: the one model of ``exchange: auto`` and ``hvd-deepreduce advise``.

    seconds = messages * latency + 8 * bytes / bits per second

These are the messages that one rank sends one after the other, and the bytes that come to the rank that receives most.
The assumptions:

- P ranks keep k of a vector's N elements each. ``Supports.union`` is how many different ones p ranks keep together:
  N (1 - (1 - k / N)^p), as supports are taken to be random and independent of each other. For the bounds they are
  alike (k), or no two ranks keep the same element (p k).
- A kept element takes as many bytes in a slice or a partial sum as in a rank's own container, which the caller
  measures. Headers of slices are not counted.
- A collective of a job (Horovod, ``torch.distributed``) is P - 1 messages, and its sizes, which go ahead, are as many.
- A histogram takes one round, as it does for supports that are nearly uniform.
- What processors do for each byte is ``Link.cpu``. ``advise`` measures it and adds the time of encoding and decoding;
  ``exchange: auto`` compares without them.
- Hosts do not disturb each other. The ranks of a host share its link (``crossing``).

Sources: the ring for the dense allreduce; DenseStream, equations 4 to 6, for its own algorithm; ``reduce_scatter`` is
counted from its messages. ``tests/exchange/test_costs.py`` compares them with counted traffic.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, expm1, inf, isinf, log1p, log2
from typing import Literal, NamedTuple

from hvd_deepreduce.codecs.sparsify.topk import kept_of
from hvd_deepreduce.config import Config
from hvd_deepreduce.exchange import balance
from hvd_deepreduce.exchange.mpi import announcement
from hvd_deepreduce.exchange.mpi.densestream import DIRECT_RANKS, LEAST_CELLS
from hvd_deepreduce.exchange.settings import AllGather, DenseStreamExchange, ExchangeSettings, ReduceScatter

AGREEMENT = 3
"""The numbers (uint64) in a session's last small allreduce (``session.py``)."""
PER_COLLECTIVE = 2
"""Rounds of P - 1 messages in a collective of a job: sizes, then bytes."""
ASSUMED_DENSITY = 0.01
"""Of sparsifiers that have no setting for it."""


@dataclass(frozen=True)
class Link:
    """Of a host, to the other hosts; or what ranks on one host exchange their bytes by.

    Attributes:
        bits_per_second: in each direction.
        latency: seconds of a message.
        cpu: processor seconds of a rank for a byte that it sends and one that it receives, with the sum of an
            allreduce.
        cpu_half: the same of an allreduce of float16, whose sum is slow on some processors; None: ``cpu``.
    """

    bits_per_second: float
    latency: float
    cpu: float = 0.0
    cpu_half: float | None = None


class Transfer(NamedTuple):
    """The time of an exchange of one vector.

    Attributes:
        seconds: from its beginning to its end.
        stack: of these, processor seconds of a rank.
        received: bytes that come over a host's link.
    """

    seconds: float
    stack: float
    received: float


class Cost(NamedTuple):
    """Of an exchange of one vector, for the rank that receives most.

    Attributes:
        messages: that it sends, one after the other.
        words: elements that it receives: float32 of a dense vector, or kept elements in the format of its containers.
        beside: bytes that it receives beside them.
    """

    messages: float
    words: float = 0.0
    beside: float = 0.0

    def __add__(self, other: object) -> Cost:
        """The cost of both, one after the other."""
        if not isinstance(other, Cost):
            return NotImplemented
        return Cost(*(one + more for one, more in zip(self, other, strict=True)))

    def transfer(self, link: Link, word_bytes: float, crossing: float = 1.0, sharing: float = 1.0) -> Transfer:
        """The time over a link.

        Args:
            word_bytes: of an element.
            crossing: bytes that cross a host's link for each one that a rank receives.
            sharing: how many ranks share a core.
        """
        own = self.words * word_bytes + self.beside
        stack = own * link.cpu * sharing
        wire = 8 * crossing * own / link.bits_per_second
        return Transfer(self.messages * link.latency + max(wire, stack), stack, crossing * own)

    def seconds(self, link: Link, word_bytes: float = 1.0) -> float:
        """The time over a link of the rank's own."""
        return self.transfer(link, word_bytes).seconds


@dataclass(frozen=True)
class Supports:
    """What the ranks keep of a vector.

    Attributes:
        numel, kept: elements of the vector, and of each rank's support.
        overlap: of the supports: ``random``, or its bounds: ``all`` ranks keep the same elements, or ``none`` do.
    """

    numel: float
    kept: float
    overlap: Literal["random", "all", "none"] = "random"

    def union(self, ranks: float) -> float:
        """How many different elements so many ranks keep together."""
        if self.overlap == "random":
            return self.numel * -expm1(ranks * log1p(-min(self.kept / self.numel, 1 - 1e-9)))
        return self.kept if self.overlap == "all" else ranks * self.kept


def crossing(ranks: int, per_host: int) -> float:
    """Bytes over a host's link for each one that a rank receives, if each rank sends to each other one by itself and
    has ``per_host`` ranks on its host. A ring crosses each link once, so it has 1."""
    return per_host * (ranks - per_host) / (ranks - 1) if per_host < ranks else 1.0


def dense(ranks: int, numel: float) -> Cost:
    """The ring allreduce: 2 (P - 1) messages, 2 (P - 1) / P N words."""
    return Cost(2 * (ranks - 1), 2 * (ranks - 1) / ranks * numel)


def allgather(ranks: int, supports: Supports) -> Cost:
    """``exchange: allgather``: one collective, (P - 1) k words."""
    return Cost(PER_COLLECTIVE * (ranks - 1), (ranks - 1) * supports.kept)


def reduce_scatter(ranks: int, supports: Supports, most: float = inf) -> Cost:
    """``exchange: reduce_scatter``: an alltoall of the ranks' slices, and an allgather of the sums'.

    Args:
        most: with a density, the elements of the sum that are sent. Two more collectives then carry one byte for each
            cell of a histogram, which balances the slices.
    """
    share, cut = (ranks - 1) / ranks, not isinf(most)
    words = share * (supports.kept + min(supports.union(ranks), most))
    cells = balance.cells_of(int(supports.numel), balance.parts_of(ranks)) if cut else 0
    return Cost(PER_COLLECTIVE * (ranks - 1) * (4 if cut else 2), words, 2 * share * cells)


def densestream(ranks: int, supports: Supports, most: float = inf) -> Cost:
    """DenseStream's allreduce of one slice, without ``small_collectives``; of s slices there are s times the messages.

    In round t of the scatter-reduce (equation 4) a rank receives half of the regions that it still has, of which 2^t
    ranks have kept elements; then it gets the sums of all other regions (equation 5). Equation 4's upper bound as
    printed has P k / 2 words in each round and is loose: where no supports overlap and each is spread evenly over the
    regions, it is k / 2 (docs/densestream.md).

    Args:
        most: with a density, the elements of the sum; partial sums are cut to twice as many.
    """
    rounds = ceil(log2(ranks))
    scattered = sum(min(supports.union(2**done), 2 * most) / 2 ** (done + 1) for done in range(rounds))
    return Cost(2 * rounds, scattered + (ranks - 1) / ranks * min(supports.union(ranks), most))


def small_collectives(ranks: int, *cells: int) -> Cost:
    """What a call over MPI sends beside its programs' messages: the allgather of the cards, the sums of the histogram
    (DenseStream on more than two ranks: so many cells in each round; the others do without), and the agreement.

    More than ``announcement.MOST_CARDS`` ranks take an allreduce in place of the cards. The allgather is counted as
    recursive doubling, each sum as a reduction to one rank and a broadcast, over binomial trees: 2 ceil(log2 P)
    messages one after the other, and ceil(log2 P) received by the root. A number has 8 bytes.
    """
    depth, numbers = ceil(log2(ranks)), [AGREEMENT, *cells]
    found = Cost(depth, 0, (ranks - 1) * announcement.CARD_BYTES)
    if ranks > announcement.MOST_CARDS:
        found = Cost(0)
        numbers.append(announcement.REDUCED)
    return found + Cost(2 * depth * len(numbers), 0, 8 * depth * sum(numbers))


def sent_of_sum(exchange: ExchangeSettings, numel: int) -> float:
    """The most elements of a sum that are sent: those of the exchange's density; without one, infinity."""
    density: float | None = getattr(exchange, "density", None)
    return inf if density is None else kept_of(density, numel)


def expected(exchange: ExchangeSettings, ranks: int, supports: Supports) -> Cost:
    """The cost of an exchange, of which only these three are modelled.

    Raises:
        ValueError: the exchange is another one than allgather, reduce_scatter and densestream.
    """
    most = sent_of_sum(exchange, int(supports.numel))
    if isinstance(exchange, AllGather):
        return allgather(ranks, supports)
    if isinstance(exchange, ReduceScatter):
        return reduce_scatter(ranks, supports, most)
    if isinstance(exchange, DenseStreamExchange):
        if ranks <= DIRECT_RANKS and isinf(most):
            return Cost(ranks - 1, (ranks - 1) * supports.kept) + small_collectives(ranks)
        cells = 4 * ranks if isinf(most) else LEAST_CELLS
        return densestream(ranks, supports, most) + small_collectives(ranks, cells)
    raise ValueError(
        f"the exchange {exchange.name!r} has no model; it must be 'allgather', 'reduce_scatter' or 'densestream'"
    )


def kept(config: Config, numel: int) -> int:
    """How many elements a rank keeps of a vector under a config."""
    sparsifier = config.sparsifier
    if sparsifier.sends_all:
        return max(1, numel)
    return max(1, kept_of(getattr(sparsifier, "density", ASSUMED_DENSITY), numel))
