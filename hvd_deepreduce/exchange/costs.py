"""The cost of an allreduce for one rank, in the latency-bandwidth model: alpha x messages + beta x words.

Sources: DenseStream, equations 4 to 6, for its own algorithm; SparCML (SC 2019, section 5) for its two algorithms and
TopkA; the ring for the dense allreduce; ``reduce_scatter`` is counted from its messages. P ranks, N
elements, of which each rank keeps k.

A word is one element: a float32 of a dense vector; for a sparse vector, as many bytes as its format takes per element,
which ``Cost.seconds`` is told. Words have two bounds: ``low`` if all ranks keep the same elements, ``high`` if no two
ranks keep the same element.
"""

from __future__ import annotations

from math import ceil, expm1, log1p, log2
from typing import NamedTuple

from hvd_deepreduce.exchange.mpi import announcement

AGREEMENT = 3
"""The numbers (uint64) in a session's last small allreduce (``session.py``)."""


class Cost(NamedTuple):
    """Of one allreduce, for one rank.

    Attributes:
        messages: the number of messages that a rank sends.
        low, high: bounds of the number of words that a rank receives.
    """

    messages: float
    low: float
    high: float

    def __add__(self, other: object) -> Cost:
        """The cost of both, one after the other."""
        if not isinstance(other, Cost):
            return NotImplemented
        return Cost(self.messages + other.messages, self.low + other.low, self.high + other.high)

    def seconds(self, alpha: float, word_bytes: float, bits_per_second: float) -> tuple[float, float]:
        """The bounds of the time in seconds, if a message has a latency of ``alpha`` seconds."""
        beta = 8 * word_bytes / bits_per_second
        return self.messages * alpha + self.low * beta, self.messages * alpha + self.high * beta


def dense(ranks: int, numel: int) -> Cost:
    """The ring allreduce: 2 (P - 1) messages, 2 (P - 1) / P N words."""
    words = 2 * (ranks - 1) / ranks * numel
    return Cost(2 * (ranks - 1), words, words)


def topk_allgather(ranks: int, kept: int) -> Cost:
    """TopkA: an allgather of k pairs per rank by recursive doubling."""
    return Cost(log2(ranks), (ranks - 1) * kept, (ranks - 1) * kept)


def sparcml(ranks: int, kept: int) -> Cost:
    """SparCML's split-allgather, if no range becomes dense."""
    share = (ranks - 1) / ranks * kept
    return Cost(ranks - 1, share, share) + Cost(log2(ranks), share, (ranks - 1) * kept)


def sparcml_doubling(ranks: int, kept: int) -> Cost:
    """SparCML's recursive doubling, if the sum does not become dense."""
    return Cost(log2(ranks), log2(ranks) * kept, (ranks - 1) * kept)


def scatter_reduce(ranks: int, kept: int) -> Cost:
    """DenseStream's scatter-reduce: equation 4, as printed.

    Its upper bound counts P k / 2 words in each of log2 P rounds. This is loose: where no supports overlap, a rank
    holds k words of its group's regions in every round and sends half of them, k / 2 (``docs/densestream.md``)."""
    return Cost(log2(ranks), (ranks - 1) / ranks * kept, log2(ranks) / 2 * ranks * kept)


def allgatherv(ranks: int, kept: int) -> Cost:
    """DenseStream's allgatherv: equation 5."""
    return Cost(log2(ranks), (ranks - 1) / ranks * kept, (ranks - 1) * kept)


def densestream(ranks: int, kept: int) -> Cost:
    """DenseStream's allreduce: equation 6, the sum of equations 4 and 5, for one slice. ``small_collectives`` has the
    rest of a call; with s slices there are s times as many messages."""
    return scatter_reduce(ranks, kept) + allgatherv(ranks, kept)


def reduce_scatter(ranks: int, kept: int, of_sum: int | None = None) -> Cost:
    """``exchange: reduce_scatter``: an alltoall and an allgather of P - 1 messages each.

    Args:
        of_sum: with ``density``, the elements of the sum that are sent. Two more collectives of P - 1 small messages
            balance the slices then. None: all of the sum is sent, and the supports are spread evenly.
    """
    share = (ranks - 1) / ranks
    if of_sum is None:
        return Cost(2 * (ranks - 1), 2 * share * kept, share * kept + (ranks - 1) * kept)
    words = share * (kept + of_sum)
    return Cost(4 * (ranks - 1), words, words)


def covered(ranks: float, numel: int, kept: int) -> float:
    """How many elements so many ranks keep together, whose supports are random and independent of each other."""
    return numel * -expm1(ranks * log1p(-min(kept / numel, 1 - 1e-9)))


def expected(name: str, ranks: int, numel: int, kept: int, of_sum: int | None) -> Cost:
    """The cost of an exchange whose supports are random and independent of each other, for ``exchange: auto``.

    Args:
        name: ``allgather``, ``reduce_scatter`` or ``densestream``.
        of_sum: as of ``reduce_scatter``.
    """
    if name == "allgather":
        return Cost(ranks - 1, (ranks - 1) * kept, (ranks - 1) * kept)
    share = (ranks - 1) / ranks
    total = covered(ranks, numel, kept) if of_sum is None else of_sum
    if name == "reduce_scatter":
        return reduce_scatter(ranks, kept, of_sum)._replace(low=share * (kept + total), high=share * (kept + total))
    words = share * total
    rounds = ceil(log2(ranks))
    for done in range(rounds):
        partial = covered(2**done, numel, kept)
        words += min(partial, partial if of_sum is None else 2 * of_sum) / 2 ** (done + 1)
    return Cost(2 * rounds, words, words)


def small_seconds(name: str, ranks: int, alpha: float, byte: float, cuts: bool) -> float:
    """The seconds of ``small_collectives`` of an exchange of ``expected``, with one round of a histogram.

    Args:
        byte: the seconds of a byte.
        cuts: whether the sum has a density.
    """
    if name != "densestream":
        return 0.0
    cells = [32] if cuts else [4 * ranks] if ranks > 2 else []
    return small_collectives(ranks, *cells).seconds(alpha, 8, 8 / max(byte, 1e-15))[1]


def small_collectives(ranks: int, *cells: int) -> Cost:
    """What a call sends beside its programs' messages: the allgather of the cards, the sums of the histogram
    (DenseStream on more than two ranks: so many cells in each round; the others do without), and the agreement.

    More than ``announcement.MOST_CARDS`` ranks take an allreduce in place of the cards. The allgather is counted as
    recursive doubling, each sum as a reduction to one rank and a broadcast, over binomial trees: 2 ceil(log2 P)
    messages one after the other, and up to ceil(log2 P) received by one rank. A word is 8 bytes here.
    """
    numbers = [AGREEMENT, *cells]
    depth, cards = ceil(log2(ranks)), (ranks - 1) * (announcement.CARD_BYTES // 8)
    if ranks > announcement.MOST_CARDS:
        numbers.append(announcement.REDUCED)
        words = sum(numbers)
        return Cost(2 * depth * len(numbers), words, depth * words)
    return Cost(depth + 2 * depth * len(numbers), cards + min(depth, 1) * sum(numbers), cards + depth * sum(numbers))
