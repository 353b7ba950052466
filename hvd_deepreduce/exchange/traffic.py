"""What an operation puts on the wire, for one rank. Needs no MPI.

Messages that this package sends itself are counted as they are. Operations of Horovod and MPI are counted by the two
formulas here, which give the bytes that cannot be avoided. Summed over the ranks, they are what the usual algorithms
send: the ring, for any size; recursive doubling, where the ranks are a power of two, more for an allreduce of few
bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple


class Traffic(NamedTuple):
    """Bytes of one rank.

    Attributes:
        sent, received: to and from other ranks, without the headers of the protocols below (TCP, InfiniBand).
    """

    sent: int = 0
    received: int = 0


NOTHING = Traffic()


def allgather(own: int, total: int, ranks: int) -> Traffic:
    """An allgather: this rank's ``own`` bytes go to all others, and their bytes, of ``total`` in all, come here.

    Who passes them on is not considered: in a ring, a rank sends on its neighbours' bytes in place of its own.
    """
    return Traffic((ranks - 1) * own, total - own)


def alltoall(rank: int, splits: Sequence[int], received: Sequence[int]) -> Traffic:
    """An alltoall: ``splits[r]`` bytes go to rank r, and ``received[r]`` come from it; its own stay with this rank."""
    return Traffic(sum(splits) - splits[rank], sum(received) - received[rank])


@lru_cache(4096)
def allreduce(size: int, ranks: int) -> Traffic:
    """An allreduce of ``size`` bytes by a ring: ``2 (ranks - 1) / ranks * size`` in each direction."""
    share = 2 * (ranks - 1) * size // ranks
    return Traffic(share, share)


@lru_cache(256)
def allreduces(sizes: tuple[int, ...], ranks: int) -> Traffic:
    """An allreduce of each of these sizes."""
    share = sum(allreduce(size, ranks).sent for size in sizes)
    return Traffic(share, share)
