"""Checks that all ranks run the same release, config and model, before any gradient is used."""

from __future__ import annotations

import json
from collections.abc import Sequence
from threading import Lock
from typing import Any

import numpy as np

import hvd_deepreduce
from hvd_deepreduce.config import Config
from hvd_deepreduce.engine.collectives import Collectives

Descriptions = Sequence[tuple[str, tuple[int, ...], str]]
"""(name, shape, dtype) of each parameter, in the model's order."""


class MismatchError(RuntimeError):
    """Ranks of one job differ in release, config or model; the message names the difference and the ranks."""

    # While TensorFlow traces a function, it re-raises with their own type only exceptions that have this constructor.
    __init__ = Exception.__init__


class Agreement:
    """Compares the ranks of a job through an allgather. Threads may share it."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._lock = Lock()
        self._compared: dict[tuple[int, ...], MismatchError | None] = {}

    def check(self, config: Config, parameters: Descriptions, steps: Sequence[int] = ()) -> list[int]:
        """Compares release, config, these parameters and their step counts. All ranks must call it.

        Returns:
            The step counts to continue with.

        Raises:
            MismatchError: they differ; raised on all ranks, with the same message.
        """
        said = statement(hvd_deepreduce.__version__, config, parameters, steps)
        gathered = self._collectives.allgather(np.frombuffer(bytearray(said + b"\n"), np.uint8), "handshake")
        told = compare(gathered.tobytes().splitlines())
        return agreed_steps([one["steps"] for one in told], [name for name, _, _ in parameters], self._collectives.elastic())

    def check_digests(self, config: Config, digests: Sequence[int]) -> None:
        """Finds the difference behind containers with different config digests.

        Threads of one rank may find it at the same time, in several gradients. The first asks the other ranks, and
        the result is kept. All ranks see the same digests, so all of them ask, or none does.

        Args:
            digests: of the containers, in rank order.

        Raises:
            MismatchError: as ``check``.
        """
        seen = tuple(digests)
        with self._lock:
            if seen not in self._compared:
                try:
                    self.check(config, [])
                    self._compared[seen] = None
                except MismatchError as error:
                    self._compared[seen] = error
            found = self._compared[seen]
        if found is not None:
            raise found


def statement(version: str, config: Config, parameters: Descriptions, steps: Sequence[int] = ()) -> bytes:
    """One rank's description of itself, as one line of JSON."""
    described = {name: f"{dtype} {list(shape)}" for name, shape, dtype in parameters}
    told = {
        "version": version,
        "package": config.packages(),
        "config": config.shared(),
        "parameter": described,
        "order": list(described),
        "steps": list(steps),
    }
    return json.dumps(told).encode()


def compare(statements: Sequence[bytes]) -> None:
    """Compares the ranks' descriptions.

    Args:
        statements: results of ``statement``, in rank order.

    Raises:
        MismatchError: they differ. Every rank compares the same statements, so every rank gets the same message.
    """
    told = [json.loads(one) for one in statements]  # another release's may lack a key
    differences = _differences("version", [one["version"] for one in told])
    for kind, dot in (("package", " "), ("config", "."), ("parameter", " ")):
        for key in dict.fromkeys(key for one in told for key in one.get(kind, {})):
            label = f"{kind}{dot}{key}"
            differences += _differences(label, [one.get(kind, {}).get(key, "missing") for one in told])
    if not differences:
        differences = _differences("the order of the parameters", [one.get("order") for one in told])
    if differences:
        shown = "; ".join(differences[:5]) + (f"; and {len(differences) - 5} more" if len(differences) > 5 else "")
        raise MismatchError(
            f"the ranks of this job do not agree: {shown}. Use the same hvd_deepreduce release, the same codec "
            "packages, the same config (including its seed) and the same model on every rank. No gradient was applied"
        )


def _differences(label: str, values: list[Any]) -> list[str]:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value if isinstance(value, str) else json.dumps(value), []).append(rank)
    if len(ranks) == 1:
        return []
    return [f"{label} is " + ", ".join(f"{value} on {_names(some)}" for value, some in ranks.items())]


def agreed_steps(told: Sequence[list[int]], names: Sequence[str], elastic: bool) -> list[int]:
    """The step counts to continue with.

    Args:
        told: each rank's, by parameter.
        names: the parameters'.
        elastic: whether ranks at step 0 are new in the job and take the others' counts.

    Raises:
        MismatchError: they differ.
    """
    known = [steps for steps in told if any(steps)] if elastic else told
    for name, steps in zip(names, zip(*known, strict=True), strict=True):
        if len(set(steps)) > 1:
            ranks = [rank for rank, steps in enumerate(told) if steps in known]
            shown = ", ".join(f"{step} on rank {rank}" for rank, step in list(zip(ranks, steps, strict=True))[:8])
            raise MismatchError(
                f"the ranks of this job do not agree: the step count of {name} is {shown}. Load the state of DeepReduce "
                "on every rank or on none. In an elastic job, give it to the state that hvd.elastic.run gets: "
                "TorchState(..., compression=compression)"
            )
    return known[0] if known else told[0]


def _names(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
