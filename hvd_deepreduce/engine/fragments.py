"""Fragments of a model, for local updates: parameters that are exchanged together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

from hvd_deepreduce.engine.reducer import Reducer
from hvd_deepreduce.engine.step_check import Place
from hvd_deepreduce.engine.tensors import G
from hvd_deepreduce.engine.ticket import Ticket
from hvd_deepreduce.exchange.collectives import Held

FRAGMENT_COUNTS = ("due", "began", "outer_steps", "ends")
"""What a state has of each fragment; ``ends`` is 0 if no exchange is in flight."""


@dataclass
class Proposal(Generic[G]):
    """An exchange that a rank wants to begin, as it was when the rank said so.

    Attributes:
        clock: of the beginning.
        ends: the clock of the end.
        due: the fragment's next beginning, if there is an exchange.
        place: where this rank is, to be compared.
        present: whether this rank sends its update, and takes the anchor.
        finite: whether its updates are.
        updates: by number.
        starts, resting: as in ``Fragment``.
        vote: in flight, under ``name``.
    """

    clock: int
    ends: int
    due: int = 0
    place: Place = field(default_factory=dict)
    present: bool = True
    finite: bool = True
    updates: dict[int, G] = field(default_factory=dict)
    starts: dict[int, Any] = field(default_factory=dict)
    resting: set[int] = field(default_factory=set)
    vote: Any = None
    name: str = ""


@dataclass
class Fragment(Generic[G]):
    """Parameters that are exchanged together.

    Attributes:
        numbers: of the parameters.
        reducer: of their updates.
        due: the clock at which the next exchange begins; with ``times``, that at which this rank takes part anyway.
        ends: the clock at which the exchange in flight ends; None: none is.
        began: the clock of the last exchange.
        outer_steps: of its part of the anchor, so far.
        proposal: whose votes have not been heard yet; None: the ranks have agreed to exchange, or none is in flight.
        held: of the updates, what was told to the other ranks and not sent yet.
        updates: the means over the ranks, by number, once they have come.
        tickets: of the updates in flight whose means have not come, by number.
        failure: an error with which they have come.
        present: whether this rank has sent an update in the exchange in flight.
        starts: with a delay, this rank's parameters when the exchange in flight began, by number.
        unsent: with a delay, what this rank has not sent of its progress, by number, until it is taken back.
        keeps: with a delay and ``mix``, the share of its parameters that this rank keeps.
        resting: numbers of the parameters that the exchange in flight leaves as they are.
    """

    numbers: list[int]
    reducer: Reducer[G]
    due: int = 0
    ends: int | None = None
    began: int = 0
    outer_steps: int = 0
    proposal: Proposal[G] | None = None
    held: Held | None = None
    updates: dict[int, G] = field(default_factory=dict)
    tickets: dict[int, Ticket[G]] = field(default_factory=dict)
    failure: Exception | None = None
    present: bool = True
    starts: dict[int, Any] = field(default_factory=dict)
    unsent: dict[int, G] = field(default_factory=dict)
    keeps: float = 0.0
    resting: set[int] = field(default_factory=set)

    def forget(self) -> None:
        """Forgets the exchange in flight."""
        self.ends = self.proposal = self.held = self.failure = None
        self.updates, self.tickets, self.starts, self.unsent, self.keeps = {}, {}, {}, {}, 0.0
        self.resting = set()


def divided(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Numbers of neighbouring parameters, about as many elements in each fragment.

    Args:
        sizes: elements of each parameter.
        most: how many fragments there are, if there are as many parameters.
    """
    count = min(most, len(sizes))
    total = sum(sizes)
    groups: list[list[int]] = [[]]
    held = 0
    for number, size in enumerate(sizes):
        left = len(sizes) - number
        middle = held + size / 2
        enough = middle * count >= total * len(groups) or left == count - len(groups)
        if groups[-1] and len(groups) < count and enough:
            groups.append([])
        groups[-1].append(number)
        held += size
    return groups
