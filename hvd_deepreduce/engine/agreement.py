"""Checks that all ranks run the same release, config and model, before any gradient is used."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

import hvd_deepreduce
from hvd_deepreduce.config import Config
from hvd_deepreduce.engine.step_check import Place
from hvd_deepreduce.exchange.collectives import Collectives
from hvd_deepreduce.exchange.statements import MismatchError, Statement, gather, refusal
from hvd_deepreduce.wire.quoting import quoted

Descriptions = Sequence[tuple[str, tuple[int, ...], str]]
"""(name, shape, dtype) of each parameter, in the model's order."""

MAX_DIFFERENCES = 5
"""Differences that a message shows."""
KINDS = {"package": " ", "config": ".", "parameter": " "}
"""The dicts in a description, and what stands between their names and their keys in a message."""
MISSING = object()


class Agreement:
    """Compares the ranks of a job through an allgather. Threads may share it."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def check(
        self,
        config: Config,
        parameters: Descriptions,
        steps: Sequence[int] = (),
        values: Mapping[str, int] = MappingProxyType({}),
        advice: str = "",
    ) -> list[int]:
        """Compares release, config, these parameters, their values and their step counts. All ranks must call it.

        Args:
            values, advice: as for ``Engine.agree``.

        Returns:
            The step counts to continue with.

        Raises:
            MismatchError: they differ; raised on all ranks, with the same message.
        """
        said = statement(hvd_deepreduce.__version__, config, parameters, steps, values)
        told = gather(self._collectives, said, "handshake")
        compare(told)
        compare_values(told, advice)
        return agreed_steps(told, self._collectives.elastic())

    def check_places(self, place: Place, advice: str | None = None) -> None:
        """Compares where the ranks are. All ranks must call it.

        Args:
            place: this rank's.
            advice: what to do if they differ.

        Raises:
            MismatchError: they differ; raised on all ranks, with the same message.
        """
        compare_places(gather(self._collectives, {"place": dict(place)}, "handshake"), advice)


def statement(
    version: str,
    config: Config,
    parameters: Descriptions,
    steps: Sequence[int] = (),
    values: Mapping[str, int] = MappingProxyType({}),
) -> Statement:
    """One rank's description of itself."""
    described = {name: f"{dtype} {list(shape)}" for name, shape, dtype in parameters}
    told: Statement = {
        "version": version,
        "package": config.packages(),
        "config": config.shared(),
        "parameter": described,
        "order": list(described),
    }
    if steps:
        told["steps"] = list(steps)
    if values:
        told["values"] = dict(values)
    return told


def _are_steps(given: object, count: int) -> bool:
    return isinstance(given, list) and len(given) == count and all(type(step) is int and step >= 0 for step in given)


def compare(told: Sequence[Statement]) -> None:
    """Compares the ranks' descriptions.

    Args:
        told: from ``read``, in rank order. Another release's may lack a key, except the version.

    Raises:
        MismatchError: they differ, or one is no description. Every rank compares the same ones, so every rank gets the
            same message.
    """
    for rank, one in enumerate(told):
        if (
            not isinstance(one.get("version"), str)
            or not all(isinstance(one.get(kind, {}), dict) for kind in KINDS)
            or not isinstance(one.get("order", []), list)
        ):
            raise refusal(rank, f"sent no description of itself, but {quoted(one)}")
    found: list[str] = []
    count = 0
    for label, values in _compared(told):
        if _differ(values):
            count += 1
            if len(found) < MAX_DIFFERENCES:
                found.append(_difference(label, values))
    if not count:
        order = _orders(told)
        if any(one != order[0] for one in order):
            count, found = 1, [_difference("the order of the parameters", order)]
    if count:
        shown = "; ".join(found) + (f"; and {count - len(found)} more" if count > len(found) else "")
        raise MismatchError(
            f"the ranks of this job do not agree: {shown}. Use the same hvd_deepreduce release, the same codec "
            "packages, the same config (including its seed) and the same model on every rank, and load a state on all "
            "ranks or on none. No gradient was applied"
        )


def compare_values(told: Sequence[Statement], advice: str) -> None:
    """Compares the hashes of the parameters' values, of those ranks that give them.

    Args:
        told: what ``compare`` found to be equal.
        advice: what makes them equal.

    Raises:
        MismatchError: they differ, or are no hashes. Every rank gets the same message.
    """
    first: dict[str, tuple[int, Any]] = {}
    others: dict[str, list[int]] = {}
    for rank, one in enumerate(told):
        values = one.get("values", {})
        if not isinstance(values, dict) or not all(type(value) is int for value in values.values()):
            raise refusal(rank, f"sent {quoted(values)} in place of hashes of its parameters")
        for name, value in values.items():
            if value != first.setdefault(name, (rank, value))[1]:
                others.setdefault(name, []).append(rank)
    if others:
        name, ranks = next(iter(others.items()))
        more = f", and so have {len(others) - 1} more" if len(others) > 1 else ""
        raise MismatchError(
            f"the ranks of this job do not begin with the same parameters: {quoted(name)} has other values on "
            f"{_names(ranks)} than on rank {first[name][0]}{more}. {advice}. No gradient was applied"
        )


def compare_places(told: Sequence[Statement], advice: str | None = None) -> None:
    """Compares where the ranks are.

    Args:
        told: from ``read``, in rank order, with the key "place".
        advice: what to do if they differ.

    Raises:
        MismatchError: they differ, or one is no place. Every rank gets the same message.
    """
    places: list[dict[str, Any]] = []
    for rank, one in enumerate(told):
        place = one.get("place")
        if not isinstance(place, dict) or not all(isinstance(value, int | str) for value in place.values()):
            raise refusal(rank, f"sent no place, but {quoted(place)}")
        places.append(place)
    names = dict.fromkeys(name for place in places for name in place)
    values = [(name, [place.get(name, MISSING) for place in places]) for name in names]
    found = [_difference(quoted(name), each) for name, each in values if _differ(each)]
    if found:
        raise MismatchError(
            f"the ranks of this job are not at the same place: {'; '.join(found[:MAX_DIFFERENCES])}. "
            f"{advice or 'Let all ranks take the same steps of the same models, in the same order'}. Nothing "
            "was exchanged"
        )


def _compared(told: Sequence[Statement]) -> Iterator[tuple[str, list[Any]]]:
    """What is compared, and its values in rank order."""
    yield "version", [one["version"] for one in told]
    for kind, dot in KINDS.items():
        for key in dict.fromkeys(key for one in told for key in one.get(kind, {})):
            yield f"{kind}{dot}{quoted(key)}", [one.get(kind, {}).get(key, MISSING) for one in told]


def _orders(told: Sequence[Statement]) -> list[Any]:
    """The names of the parameters, from the first one that differs."""
    orders = [one.get("order") or [] for one in told]
    same = next((at for at, names in enumerate(zip_longest(*orders)) if any(n != names[0] for n in names)), 0)
    return [order[same : same + 8] for order in orders]


def _difference(label: str, values: Sequence[Any]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(_text(value), []).append(rank)
    first = [values[some[0]] for some in ranks.values()]
    named = ["missing" if value is MISSING else quoted(value) for value in first]
    shown = [f"{value} on {_names(some)}" for value, some in zip(named, ranks.values(), strict=True)]
    more = f", and {len(shown) - 4} other values" if len(shown) > 4 else ""
    return f"{label} is " + ", ".join(shown[:4]) + more


def _differ(values: Sequence[Any]) -> bool:
    first = values[0]
    # Most values are texts, and there are as many as parameters times ranks.
    return any(value != first if isinstance(value, str) else _text(value) != _text(first) for value in values)


def _text(value: object) -> str:
    """Equal for equal values only; unlike ``==``, which holds for 1 and True."""
    try:
        return "" if value is MISSING else json.dumps(value)
    except RecursionError:
        return "nested too deeply"


def agreed_steps(told: Sequence[Statement], elastic: bool) -> list[int]:
    """The step counts to continue with.

    Args:
        told: what ``compare`` found to be equal but for the step counts.
        elastic: whether ranks at step 0 are new in the job and take the others' counts.

    Raises:
        MismatchError: they differ.
    """
    names: list[Any] = told[0].get("order", [])
    steps: list[list[int]] = [one.get("steps", [0] * len(names)) for one in told]
    for rank, counts in enumerate(steps):
        if not _are_steps(counts, len(names)):
            raise refusal(rank, f"sent {quoted(counts)} in place of its step counts")
    known = [rank for rank, counts in enumerate(steps) if any(counts) or not elastic]
    for at, name in enumerate(names):
        counts = [steps[rank][at] for rank in known]
        if any(count != counts[0] for count in counts):
            shown = ", ".join(f"{count} on rank {rank}" for rank, count in list(zip(known, counts, strict=True))[:8])
            raise MismatchError(
                f"the ranks of this job do not agree: the step count of {quoted(name)} is {shown}. Load the state of "
                "DeepReduce on every rank or on none. In an elastic job, make it a part of the state that "
                "hvd.elastic.run gets (docs/elastic.md)"
            )
    return list(steps[known[0]] if known else steps[0])


def _names(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
