"""Runs programs that ask for collectives (``balance.Steps``) for all ranks in one process, and counts their bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, count, pairwise
from typing import Any

import numpy as np

from hvd_deepreduce.codecs.interfaces import U8
from hvd_deepreduce.exchange import traffic
from hvd_deepreduce.exchange.balance import AllGather, AllToAll, Steps
from hvd_deepreduce.ops import arrays


class CollectiveNetwork:
    """Carries the collectives of ``size`` ranks.

    Attributes:
        size: the number of ranks.
        sent, received: int64 ``[size]``: bytes of each rank, as ``stats()`` counts them.
        alltoalls, allgathers: how many collectives there were.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.sent = np.zeros(size, np.int64)
        self.received = np.zeros(size, np.int64)
        self.alltoalls = self.allgathers = 0

    def run(self, programs: Sequence[Steps]) -> list[Any]:
        """Runs the program of each rank to its end, and returns what they return.

        Raises:
            RuntimeError: the ranks ask for different collectives, or some of them end while others wait.
            Exception: what all ranks have raised, if the texts are the same.
        """
        answers: list[Any] = [None] * self.size
        while True:
            asked: list[AllToAll | AllGather] = []
            ended: list[Any] = []
            failed: list[Exception] = []
            for program, answer in zip(programs, answers, strict=True):
                try:
                    asked.append(program.send(answer))
                except StopIteration as end:
                    ended.append(end.value)
                except Exception as error:
                    failed.append(error)
            if len(failed) == self.size and len({str(error) for error in failed}) == 1:
                raise failed[0]
            if len(ended) == self.size:
                return ended
            if len(asked) < self.size or len({type(one) for one in asked}) > 1:
                raise RuntimeError(f"{len(asked)} ranks wait, {len(ended)} have ended, {len(failed)} failed: {failed}")
            answers = self._alltoall(asked) if isinstance(asked[0], AllToAll) else self._allgather(asked)

    def _alltoall(self, asked: Sequence[Any]) -> list[tuple[U8, list[int]]]:
        self.alltoalls += 1
        places = [list(pairwise(accumulate(one.splits, initial=0))) for one in asked]
        sent = [arrays.to_host(one.data) for one in asked]
        answers = []
        for rank in range(self.size):
            parts = [data[slice(*place[rank])] for data, place in zip(sent, places, strict=True)]
            sizes = [part.size for part in parts]
            answers.append((np.concatenate(parts), sizes))
            self._count(rank, traffic.alltoall(rank, asked[rank].splits, sizes))
        return answers

    def _allgather(self, asked: Sequence[Any]) -> list[U8]:
        self.allgathers += 1
        gathered = np.concatenate([arrays.to_host(one.data) for one in asked])
        for rank, one in enumerate(asked):
            self._count(rank, traffic.allgather(one.data.size, gathered.size, self.size))
        return [gathered] * self.size

    def _count(self, rank: int, wire: traffic.Traffic) -> None:
        self.sent[rank] += wire.sent
        self.received[rank] += wire.received


def altered(
    program: Steps,
    asks: Callable[[int, Any], Any] = lambda number, asked: asked,
    gets: Callable[[int, Any], Any] = lambda number, answer: answer,
) -> Steps:
    """The program of a rank that asks for something else, or gets another answer; with the number of the collective."""
    answer: Any = None
    for number in count():
        try:
            asked = program.send(answer)
        except StopIteration as end:
            return end.value
        answer = gets(number, (yield asks(number, asked)))
