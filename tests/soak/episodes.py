"""An episode of the soak: a small job on ``RANKS`` ranks with one fault. Everything about it follows from its seed.

An episode ends well in one of three ways:

- *equal*: all ranks have made all steps, their parameters and sums are bitwise equal, and what was sent plus what the
  residuals hold is what came.
- *same error*: all ranks have raised an error with the same text.
- *job ended*: a rank was killed, or an error that only it can know (of the user's code, of an encoder) ended it; the
  launcher has ended the job with an error, and no rank has finished the episode.

Anything else, or a rank that still waits after the limit, is a failure.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import hvd_deepreduce.config.settings  # noqa: F401  (registers the codecs)
from hvd_deepreduce.codecs.interfaces import index_codecs, joint_codecs, sparsifiers, value_codecs
from tests.adapters.scopes import SCOPES

RANKS = 3
LIMIT_SECONDS = 60.0
"""After which an episode has failed if no rank has made a step or ended it meanwhile."""

PROGRESS = "progress"
"""The file that a rank touches after each step."""

Way = tuple[str, str]
"""A launcher and a framework."""

FAULTS = {
    "none": "no fault",
    "stopped": "a rank stopped (SIGSTOP) for some seconds in its step",
    "killed": "a rank killed in its step",
    "raised": "the user's code raised in the backward pass of a rank",
    "memory": "an allocation inside the package failed on a rank",
    "corrupted": "a bit of what a rank sent flipped",
    "nan": "NaN or infinity in a rank's gradient",
    "config": "a setting changed on one rank",
    "state": "NaN in a state that one rank loads",
    "restored": "all ranks go back to a saved state",
}
WAYS: dict[Way, tuple[int, tuple[str, ...]]] = {
    ("mpirun", "torch"): (10, tuple(FAULTS)),
    ("horovodrun --gloo", "torch"): (3, tuple(FAULTS)),
    ("mpirun", "mpi4py"): (6, ("none", "stopped", "killed", "memory", "corrupted", "nan", "config")),
    ("mpirun", "tensorflow"): (2, ("none", "killed", "stopped", "corrupted", "nan", "config", "state", "restored")),
    ("horovodrun --gloo", "tensorflow"): (1, ("none", "killed", "corrupted", "nan", "config", "restored")),
}
"""How often each way occurs, and which faults it can have."""

INDEX, VALUE, JOINT = (tuple(sorted(codecs.by_name)) for codecs in (index_codecs, value_codecs, joint_codecs))
OVER_MPI = ("densestream", "sparcml", "topk_allgather")
SPARSIFIERS = tuple(name for name, codec in sorted(sparsifiers.by_name.items()) if "density" in codec.model_fields)


@dataclass(frozen=True)
class Episode:
    """One episode.

    Attributes:
        seed: its name.
        way: the launcher and the framework.
        fault: one of ``FAULTS``.
        bad: the rank that has the fault.
        at: the step that has it.
        point: where in the step, 0 to 1.
        seconds: for which a rank is stopped.
        steps: of the whole episode.
        config: of the job.
        changed: the keys of the config that the fault ``config`` changes.
        shapes: of the parameters; no two have the same number of elements.
    """

    seed: int
    way: Way
    fault: str
    bad: int
    at: int
    point: float
    seconds: float
    steps: int
    config: Mapping[str, Any]
    changed: Mapping[str, Any]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(int(np.prod(shape)) for shape in self.shapes)

    @property
    def over_mpi(self) -> bool:
        """Whether an exchange over mpi4py sums, and not Horovod's collectives of containers."""
        return _over_mpi(self.config)

    def gradient(self, step: int, rank: int) -> np.ndarray:
        """Of a rank in a step, float32 ``[numel]``."""
        rng = np.random.default_rng([self.seed, step, rank])
        gradient = rng.standard_normal(self.numel).astype(np.float32)
        if self.fault == "nan" and (step, rank) == (self.at, self.bad):
            gradient[int(self.point * self.numel)] = (np.nan, np.inf, -np.inf)[self.seed % 3]
        return gradient

    def __str__(self) -> str:
        launcher, framework = self.way
        return (
            f"episode {self.seed}: {FAULTS[self.fault]} (rank {self.bad}, step {self.at} of {self.steps}); {framework} "
            f"under {launcher}; config {dict(self.config)}"
            + (f"; changed {dict(self.changed)}" if self.fault == "config" else "")
        )


def episode(seed: int) -> Episode:
    """The episode with this name."""
    draw = random.Random(seed)
    way = draw.choices(list(WAYS), [weight for weight, _ in WAYS.values()])[0]
    fault = draw.choice(WAYS[way][1])
    config, changed = _config(draw, way)
    steps = draw.randint(10, 60)
    sizes = draw.sample(range(600, 5000), draw.randint(1, 5))
    return Episode(
        seed, way, fault, draw.randrange(RANKS), draw.randrange(1, steps - 3), draw.random(), draw.uniform(0.3, 2.5),
        steps, config, changed, tuple((size,) for size in sizes),
    )  # fmt: skip


def _over_mpi(config: Mapping[str, Any]) -> bool:
    exchange = config.get("exchange", "allgather")
    return (exchange["name"] if isinstance(exchange, dict) else exchange) in OVER_MPI


def _config(draw: random.Random, way: Way) -> tuple[dict[str, Any], dict[str, Any]]:
    """A config, and a change of it."""
    launcher, framework = way
    scopes = [scope for scope in SCOPES if "exchange" in scope and (framework != "mpi4py" or _over_mpi(scope))]
    config: dict[str, Any] = {"seed": draw.randrange(1000)}
    density = draw.choice((0.01, 0.05, 0.3))
    if framework == "mpi4py" or (launcher == "mpirun" and draw.random() < 0.5):
        config |= draw.choice(scopes)
        config["sparsifier"] = {"name": "topk", "density": density}
        if config["exchange"] == "densestream":
            value = draw.choice(("raw", "float16", "bfloat16", "qsgd"))
            config["exchange"] = {"name": "densestream", "value": value}
            if value == "qsgd":  # coded blocks of other values have no zeros to fill
                config["exchange"]["fill"] = draw.random() < 0.5
        changes: list[dict[str, Any]] = [
            {"exchange": {"name": "densestream", "value": "raw", "coded": False}},
            {"exchange": "sparcml"},
        ]
        if framework != "mpi4py":
            changes.append({"scope": "bucket", "bucket_bytes": 4000})
    else:
        of_containers = [scope for scope in SCOPES if "exchange" not in scope]
        config |= draw.choice([{"scope": "tensor", "min_elements": 0}, *of_containers])
        config["sparsifier"] = {"name": draw.choice(SPARSIFIERS), "density": density}
        if draw.random() < 0.25:
            config["joint"] = draw.choice(JOINT)
        else:
            config |= {"index": draw.choice(INDEX), "value": draw.choice(VALUE)}
        changes = [{"seed": 5000}, {"sparsifier": {"name": "topk", "density": 0.2}}]
        if framework == "torch":
            tensor = config["scope"] == "tensor"
            changes.append({"scope": "model"} if tensor else {"scope": "tensor", "min_elements": 0})
    return config, draw.choice([change for change in changes if {**config, **change} != config])


def segments_file(folder: Path, seed: int, rank: int) -> Path:
    """Where a rank writes what came, what it kept and what was sent: float64 ``[segments, 3, numel]``. A segment ends
    where a step is lost."""
    return folder / f"{seed}.{rank}.npy"


def judge(
    one: Episode, folder: Path, records: Mapping[int, Mapping[str, Any]], status: int | None
) -> tuple[str, str]:
    """How an episode ended.

    Args:
        one: the episode.
        folder: in which the ranks write.
        records: what each rank wrote, by rank; a rank without a record has not ended it.
        status: of the launcher; None: it still runs, or was stopped for not ending.

    Returns:
        "equal", "same error", "job ended" or "failed"; and for the last, why.
    """
    ends = {rank: record["end"] for rank, record in records.items()}
    missing = [rank for rank in range(RANKS) if rank not in records]
    texts = {record["error"] for record in records.values() if record["end"] == "error"}
    if not missing and set(ends.values()) == {"finished"}:
        return _judge_finished(one, folder, records)
    if not missing and set(ends.values()) == {"error"} and len(texts) == 1:
        return "same error", ""
    said = "; ".join(
        f"rank {rank}: " + ("did not end it" if rank in missing else records[rank].get("error") or ends[rank])
        for rank in range(RANKS)
    )
    left = one.fault == "killed" or "left" in ends.values()
    if left and status and "finished" not in ends.values():
        return "job ended", ""
    return "failed", f"{said}; status of the launcher: {status}"


def _judge_finished(one: Episode, folder: Path, records: Mapping[int, Mapping[str, Any]]) -> tuple[str, str]:
    if len({record["digest"] for record in records.values()}) > 1:
        return "failed", "the ranks' parameters or sums differ, and no rank raised an error"
    segments = np.stack([np.load(segments_file(folder, one.seed, rank)) for rank in range(RANKS)])
    came, kept, sent = np.moveaxis(segments, 2, 0)
    rest = np.abs(came.sum(0) - kept.sum(0) - sent[0]).max()
    if not rest <= 1e-4 * max(1.0, np.abs(came).max()):
        return "failed", f"sent + residuals differ from the gradients by {rest:.3g}"
    return "equal", ""
