"""Two nodes of two ranks in one process: runs the programs of ``exchange/two_levels.py``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from hvd_deepreduce.exchange.balance import Inside
from hvd_deepreduce.exchange.two_levels import RankPosition
from hvd_deepreduce.wire.standalone import ContainerError
from tests.support.simulated_collectives import CollectiveNetwork

INSIDE, ACROSS = ((0, 1), (2, 3)), ((0, 2), (1, 3))
PLACES = [RankPosition(rank, INSIDE[rank // 2], ACROSS[rank % 2]) for rank in range(4)]


def run(
    programs: Sequence[Any], change: Callable[[int, Any], Any] = lambda number, asked: asked, bad: int = 1
) -> list[Any]:
    """What the four ranks return, or the ContainerError that they raise. All take part in all collectives.

    As in a job, a collective takes place as soon as its group is there: two groups between nodes need not take the same
    number of steps.

    Args:
        change: what the rank ``bad`` sends in its collective with this number, of what it would send.
    """
    asked: dict[int, Any] = {}
    ends: dict[int, Any] = {}
    numbers = itertools.count()

    def go_on(rank: int, answer: Any) -> None:
        try:
            asked[rank] = programs[rank].send(answer)
        except StopIteration as end:
            ends[rank] = end.value
        except ContainerError as error:
            ends[rank] = error

    for rank in range(4):
        go_on(rank, None)
    while asked:
        group, inside = _meeting(asked)
        plain = [asked[rank].asked if inside else asked[rank] for rank in group]
        if bad in group:
            plain[group.index(bad)] = change(next(numbers), plain[group.index(bad)])
        for rank, answer in zip(group, _carried(plain), strict=True):
            del asked[rank]
            go_on(rank, answer)
    return [ends[rank] for rank in range(4)]


def _meeting(asked: dict[int, Any]) -> tuple[tuple[int, ...], bool]:
    """A group whose ranks all ask for one of its collectives; and whether it is one inside a node."""
    for inside, groups in ((True, INSIDE), (False, ACROSS)):
        for group in groups:
            if all(rank in asked and isinstance(asked[rank], Inside) == inside for rank in group):
                return group, inside
    raise AssertionError(f"ranks {sorted(asked)} wait for ever")


def _carried(asked: Sequence[Any]) -> list[Any]:
    """The answers of a group of ranks that ask for one collective."""

    def program(one: Any) -> Any:
        return (yield one)

    return CollectiveNetwork(len(asked)).run([program(one) for one in asked])
