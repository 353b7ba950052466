"""What an allreduce costs a rank in the latency-bandwidth model: ``messages`` times alpha, ``words`` times beta.

DenseStream, equations 4 to 6, for its own algorithm; SparCML (SC 2019, section 5) for its two and for TopkA; the ring
for dense. P ranks, N elements of which each rank keeps k. A word is one element: a float32 of a dense vector; of a
sparse one, what its format takes an element: ``seconds`` is told how many bytes. Words have two bounds: ``low`` where
all ranks keep the same elements, ``high`` where no two keep the same.
"""

from __future__ import annotations

from math import log2
from typing import NamedTuple


class Cost(NamedTuple):
    """Of one allreduce, for one rank."""

    messages: float
    low: float
    high: float

    def __add__(self, other: object) -> Cost:
        """One behind the other."""
        if not isinstance(other, Cost):
            return NotImplemented
        return Cost(self.messages + other.messages, self.low + other.low, self.high + other.high)

    def seconds(self, alpha: float, word_bytes: float, bits_per_second: float) -> tuple[float, float]:
        """The bounds of the time, with ``alpha`` seconds a message."""
        beta = 8 * word_bytes / bits_per_second
        return self.messages * alpha + self.low * beta, self.messages * alpha + self.high * beta


def dense(ranks: int, numel: int) -> Cost:
    """Ring allreduce: 2 (P - 1) messages, 2 (P - 1) / P N words."""
    words = 2 * (ranks - 1) / ranks * numel
    return Cost(2 * (ranks - 1), words, words)


def topk_allgather(ranks: int, kept: int) -> Cost:
    """Recursive doubling of k pairs a rank."""
    return Cost(log2(ranks), (ranks - 1) * kept, (ranks - 1) * kept)


def sparcml(ranks: int, kept: int) -> Cost:
    """Split-allgather, as long as no range turns dense."""
    share = (ranks - 1) / ranks * kept
    return Cost(ranks - 1, share, share) + Cost(log2(ranks), share, (ranks - 1) * kept)


def sparcml_doubling(ranks: int, kept: int) -> Cost:
    """Recursive doubling, as long as the sum does not turn dense."""
    return Cost(log2(ranks), log2(ranks) * kept, (ranks - 1) * kept)


def scatter_reduce(ranks: int, kept: int) -> Cost:
    """Equation 4, as printed. Its upper bound counts P k / 2 words in each of log2 P rounds; but where no supports
    overlap, a rank's message is half of the k words that it holds of its own share: k / 2 (``docs/densestream.md``)."""
    return Cost(log2(ranks), (ranks - 1) / ranks * kept, log2(ranks) / 2 * ranks * kept)


def allgatherv(ranks: int, kept: int) -> Cost:
    """Equation 5."""
    return Cost(log2(ranks), (ranks - 1) / ranks * kept, (ranks - 1) * kept)


def densestream(ranks: int, kept: int) -> Cost:
    """Equation 6, the sum of 4 and 5; without the allreduce of the boundaries, P numbers."""
    return scatter_reduce(ranks, kept) + allgatherv(ranks, kept)
