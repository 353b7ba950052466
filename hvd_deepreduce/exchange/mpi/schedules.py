"""Who sends to whom: recursive halving and recursive doubling, for any number of ranks. Needs no MPI.

Rabenseifner, "Optimization of collective reduction operations", ICCS 2004 (DenseStream's reference 20, its figure 3);
the treatment of numbers of ranks that are no powers of two is ours.

In every round of recursive halving, each group of ranks is divided into a left and a right half, and every rank sends
the other half its data for that half's regions. After ceil(log2 P) rounds each group is one rank, which has the sum of
its own region. Recursive doubling is the same in reverse: it brings every region to all ranks. For five ranks::

    groups                 round 1         round 2         round 3
    {0 1 2 | 3 4}          0 <-> 3
                           1 <-> 4
                           2 --> 4
    {0 1 | 2}  {3 | 4}                     0 <-> 2
                                           1 --> 2
                                           3 <-> 4
    {0 | 1}                                                0 <-> 1

An odd rank belongs to the left half. It has no partner of its own: it sends to the last rank of the right half and
receives nothing, because the other ranks of its half receive all data for that half. No rank hands in its whole vector,
as it does where P is first reduced to a power of two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hvd_deepreduce.codecs.interfaces import U8
from hvd_deepreduce.exchange.mpi.transport import Program, Receive, Transport


@dataclass(frozen=True)
class HalvingRound:
    """One rank's part in one round of recursive halving.

    Attributes:
        middle: the first rank of the right half.
        own_half, other_half: the ranks of the half that this rank belongs to, and of the other.
        send_to: the ranks to which this rank sends its data for the other half's regions.
        receive_from: the ranks that send this rank their data for its own half's regions.
    """

    middle: int
    own_half: range
    other_half: range
    send_to: list[int]
    receive_from: list[int]


def halving_rounds(rank: int, size: int) -> list[HalvingRound]:
    """The rounds of recursive halving for one of ``size`` ranks; in reverse order, those of recursive doubling."""
    rounds = []
    low, high = 0, size
    while high - low > 1:
        middle = low + (high - low + 1) // 2
        left, right = range(low, middle), range(middle, high)
        if rank < middle:
            i = rank - low
            has_partner = i < len(right)
            partner = right[min(i, len(right) - 1)]
            rounds.append(HalvingRound(middle, left, right, [partner], [partner] if has_partner else []))
            high = middle
        else:
            partner = left[rank - middle]
            odd = [left[-1]] if rank == high - 1 and len(left) > len(right) else []
            rounds.append(HalvingRound(middle, right, left, [partner], [partner, *odd]))
            low = middle
    return rounds


def allgather(
    transport: Transport, tag: int, section: U8, elements: Callable[[range], int], deliver: Callable[[int, U8], None]
) -> Program:
    """Allgather by recursive doubling: brings every rank's section to all ranks.

    Args:
        section: this rank's packed stream.
        elements: called as ``elements(ranks)``: the most elements that the sections of these ranks cover.
        deliver: called as ``deliver(rank, section)`` for every rank, this one included, in the order of arrival.
    """
    sections = {transport.rank: section}
    transport.attempt(None, deliver, transport.rank, section)
    for halving in reversed(halving_rounds(transport.rank, transport.size)):
        for to in halving.receive_from:
            transport.send(to, tag, [sections[rank] for rank in halving.own_half])
        for source in halving.send_to:
            others = halving.other_half
            received = yield Receive(source, tag, len(others), elements(others))
            for rank, part in zip(others, received, strict=True):
                sections[rank] = part
                transport.attempt(None, deliver, rank, part)
