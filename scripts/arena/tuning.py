"""Tunes the knobs of a method with a fixed number of trials, and says whether the optimum is inside the grid.

The search is a coordinate descent on a grid. It is a generator, which knows nothing of trainings: it yields the
settings that it wants to know the loss of, and gets the losses. The same losses give the same search, so a search whose
trials are in a file continues where it stopped.
"""

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

Point = dict[str, int]
"""The place of each knob on its grid."""
Losses = Generator[list[dict[str, Any]], list[float], "Tuned"]


@dataclass(frozen=True)
class Scale:
    """A knob with values in equal ratios, ``start * ratio ** n``, to three digits. The grid grows as the search needs.

    Attributes:
        start: where the search begins: the published value, or that of the nearest method.
        ratio: from one value to the next.
        least, most: limits that the method itself has. A value beyond one becomes the limit, where an optimum is fine.
    """

    start: float
    ratio: float = 2.0
    least: float = 0.0
    most: float = math.inf

    def value(self, place: int) -> float:
        return float(f"{min(self.most, max(self.least, self.start * self.ratio**place)):.3g}")

    def beside(self, place: int) -> list[int]:
        """The places next to one; none beyond a limit."""
        return [place + way for way in (-1, 1) if self.value(place + way) != self.value(place)]

    def open_end(self, place: int) -> bool:
        """Whether the grid ends here without need: never, as it grows."""
        return False


@dataclass(frozen=True)
class Choice:
    """A knob with listed values, in their order.

    Attributes:
        values: in ascending order.
        start: the one with which the search begins.
        ends: whether there are no sensible values below the first, and above the last one, so that an optimum there is
            inside the grid. A momentum of 0 is such an end; the longest period that somebody listed is none.
    """

    values: Sequence[Any]
    start: Any
    ends: tuple[bool, bool] = (False, False)

    def value(self, place: int) -> Any:
        return self.values[self.values.index(self.start) + place]

    def beside(self, place: int) -> list[int]:
        first = -self.values.index(self.start)
        return [near for near in (place - 1, place + 1) if first <= near < first + len(self.values)]

    def open_end(self, place: int) -> bool:
        value = self.value(place)
        return (value == self.values[0] and not self.ends[0]) or (value == self.values[-1] and not self.ends[1])


Knobs = Mapping[str, Scale | Choice]
K = TypeVar("K", Scale, Choice)


@dataclass(frozen=True)
class Tuned:
    """The end of a search.

    Attributes:
        settings: with the least loss.
        loss: theirs.
        trials: settings that were tried.
        at_edge: knobs whose best value has a neighbour that was not tried, or that is the last of its list: there may
            be a better one beyond. Empty: the optimum is inside the grid.
    """

    settings: dict[str, Any]
    loss: float
    trials: int
    at_edge: tuple[str, ...] = ()


def settings_of(knobs: Knobs, point: Point) -> dict[str, Any]:
    """The values of the knobs at a point."""
    return {name: knob.value(point[name]) for name, knob in knobs.items()}


def search(knobs: Knobs, trials: int, start: Mapping[str, Any] | None = None) -> Losses:
    """Tries one knob after another, both neighbours of the best value, and goes on in the direction that is better.

    Yields:
        Settings that were not tried yet; send their losses, of which NaN and infinity count as worst.

    Args:
        knobs: by name; the first ones are tuned first.
        trials: at most so many settings are tried. The search ends before if no neighbour of the best point is better.
        start: values of knobs, in place of those that they start with.

    Returns:
        The best settings.
    """
    given = {name: starting(knob, (start or {}).get(name)) for name, knob in knobs.items()}
    point = dict.fromkeys(given, 0)
    known: dict[tuple[int, ...], float] = {}

    def missing(points: list[Point]) -> list[Point]:
        fresh = {tuple(one.values()): one for one in points if tuple(one.values()) not in known}
        return list(fresh.values())[: trials - len(known)]

    def tried(points: list[Point]) -> Generator[list[dict[str, Any]], list[float], None]:
        if wanted := missing(points):
            losses = yield [settings_of(given, one) for one in wanted]
            for one, loss in zip(wanted, losses, strict=True):
                known[tuple(one.values())] = loss if math.isfinite(loss) else math.inf

    def near(name: str) -> list[Point]:
        return [{**point, name: place} for place in given[name].beside(point[name])]

    def loss_at(one: Point) -> float:
        return known.get(tuple(one.values()), math.inf)

    yield from tried([point])
    moved = True
    while moved and len(known) < trials:
        moved = False
        for name in given:
            while True:
                yield from tried(near(name))
                best = min(near(name), key=loss_at, default=point)
                if loss_at(best) >= loss_at(point):
                    break
                point, moved = best, True
    at_edge = tuple(
        name
        for name, knob in given.items()
        if knob.open_end(point[name]) or any(tuple(one.values()) not in known for one in near(name))
    )
    return Tuned(settings_of(given, point), loss_at(point), len(known), at_edge)


def starting(knob: K, value: Any) -> K:
    """The knob with another start; None: with its own."""
    return knob if value is None else replace(knob, start=value)
