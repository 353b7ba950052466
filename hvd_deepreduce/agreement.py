"""Do all ranks run the same release, config and model? Found out before any gradient is used."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hvd_deepreduce.config import Config

Parameters = Sequence[tuple[str, tuple[int, ...], str]]
"""(name, shape, dtype) of each parameter, in the model's order."""


class MismatchError(RuntimeError):
    """Ranks of one job that differ in release, config or model; names the difference and the ranks."""

    # TensorFlow traces functions, and raises again, with their type, only exceptions that are made like this.
    __init__ = Exception.__init__


def statement(version: str, config: Config, parameters: Parameters) -> bytes:
    """What a rank says of itself, to be gathered from all ranks."""
    described = {name: f"{dtype} {list(shape)}" for name, shape, dtype in parameters}
    told = {"version": version, "config": config.shared(), "parameters": described, "order": list(described)}
    return json.dumps(told).encode()


def compare(statements: Sequence[bytes]) -> None:
    """Compares what all ranks said.

    Args:
        statements: of ``statement``, in rank order.

    Raises:
        MismatchError: where they differ. All ranks compare the same statements, so all raise the same sentence.
    """
    told = [json.loads(one) for one in statements]
    differences = _differences("version", [one["version"] for one in told])
    for kind in ("config", "parameters"):
        keys = list(dict.fromkeys(key for one in told for key in one[kind]))
        for key in keys:
            label = f"{kind}.{key}" if kind == "config" else f"parameter {key}"
            differences += _differences(label, [one[kind].get(key, "not there") for one in told])
    if not differences:
        differences = _differences("the order of the parameters", [one["order"] for one in told])
    if differences:
        shown = "; ".join(differences[:5]) + (f"; and {len(differences) - 5} more" if len(differences) > 5 else "")
        raise MismatchError(
            f"the ranks of this job do not agree: {shown}. Give every rank the same hvd_deepreduce release, config and "
            "model (the seed too); no gradient was used"
        )


def _differences(label: str, values: list[Any]) -> list[str]:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value if isinstance(value, str) else json.dumps(value), []).append(rank)
    if len(ranks) == 1:
        return []
    return [f"{label} is " + ", ".join(f"{value} on {_names(some)}" for value, some in ranks.items())]


def _names(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
