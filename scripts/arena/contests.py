"""The contests: jobs, methods with their knobs, and budgets, as plain data.

A knob's name is the path of a setting, as in ``with.decay``. A search begins with the published value of a knob, or
where the paper names none for such a job, with that of the nearest method.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schemes import subset_bits
from tuning import Choice, Knobs, Scale


@dataclass(frozen=True)
class Method:
    """What is trained, and what is tuned.

    Attributes:
        words: for the tables.
        fixed: settings, by their paths.
        knobs: by their paths.
        ours: whether it is ours, and no published method.
        share: bytes relative to dense that decide the density, whose path is ``density``, once ``every`` is known.
        value_bits: of a value that is sent.
    """

    words: str
    fixed: Mapping[str, Any]
    knobs: Knobs
    ours: bool = False
    share: float | None = None
    density: str = ""
    value_bits: float = 1.0

    def settings(self, point: Mapping[str, Any], workers: int) -> dict[str, Any]:
        """The settings of trainer.py at a point of the knobs."""
        settings: dict[str, Any] = {}
        for path, value in {**self.fixed, **point}.items():
            put(settings, path, copy.deepcopy(value))
        if self.share is not None:
            put(settings, self.density, density_of(self.share, workers, settings.get("every", 1), self.value_bits))
        return settings


@dataclass(frozen=True)
class Claim:
    """What is said of a method, and checked.

    Attributes:
        method, reference: whose mean loss is compared, at equal seeds.
        most: the largest gap, in nats.
        share: the largest share of dense's bytes.
        source: who says it, with the published figure; empty: we.
    """

    method: str
    reference: str
    most: float
    share: float = 1.0
    source: str = ""


@dataclass(frozen=True)
class Contest:
    """Methods that train one job, each tuned with the same number of trials.

    Attributes:
        title: for the page.
        job: of trainer.py.
        workers: their number.
        steps: of a training that is reported.
        short: of the trainings of the first search.
        trials: that each method has in the first search.
        methods: by name; the first one is the reference.
        claims: that are checked.
        again: knobs that are searched once more with whole trainings, since their optimum depends on the length.
        seeds: that are reported.
        tuning_seed: of all searches.
    """

    title: str
    job: str
    workers: int
    steps: int
    short: int
    trials: int
    methods: Mapping[str, Method]
    claims: tuple[Claim, ...] = ()
    again: tuple[str, ...] = ("lr",)
    seeds: tuple[int, ...] = (0, 1, 2)
    tuning_seed: int = 100


def put(settings: dict[str, Any], path: str, value: Any) -> None:
    """Writes a value to a path such as ``with.decay``; a part that is a mapping is made."""
    *folders, last = path.split(".")
    for folder in folders:
        settings = settings.setdefault(folder, {})
    settings[last] = value


def density_of(share: float, workers: int, every: int, value_bits: float, numel: int = 1_000_000) -> float:
    """The density at which a container a round takes this share of dense's bytes.

    A worker sends its container to each other one, in ``every`` steps once; dense's ring sends 2 (R - 1) / R of 32 bits
    an element in each step. Indices take as many bits as there are subsets.
    """
    budget = 64 * share * every / workers
    low, high = 1e-6, 1.0
    for _ in range(60):
        middle = math.sqrt(low * high)
        bits = subset_bits(max(1, round(middle * numel)), numel) / numel + middle * value_bits
        low, high = (middle, high) if bits < budget else (low, middle)
    return float(f"{low:.3g}")


LR = Scale(2.5e-3, 1.5)
DECAY = Choice((0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8), 0.1, (True, False))
ADAMW = {"optimizer": "adamw", "clip": 1.0, "weight_decay": 0.1}
SIGNS = {"optimizer": "sign", "clip": 1.0, "clip_first": True, "weight_decay": 0.1, "scheme": "sparse_signs"}
MOMENTA = Choice((0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 1.0), 0.999, (False, True))


def signs(share: float, **more: Any) -> Method:
    """Our method at a budget."""
    return Method(
        f"**signs of momentum**, {share:.2%}", {**SIGNS, **more},
        {"lr": Scale(4e-3, 1.5), "with.decay": MOMENTA, "weight_decay": DECAY}, True, share, "with.density",
    )  # fmt: skip


def in_each_step(workers: int) -> Contest:
    """AdamW's users, who exchange in each step."""
    methods = {
        "dense": Method(
            "dense, AdamW", {**ADAMW, "scheme": "dense"}, {"lr": LR, "weight_decay": DECAY, "beta2": BETA2}
        ),
        "signs 0.7%": signs(0.007),
        "signs 0.25%": signs(0.0025),
        "demo": Method(
            "DeMo, chunks of 64 x 64, at 0.7%",
            {**SIGNS, "scheme": "demo", "with": {"chunk": 64, "decay": 0.999, "top": 8}},
            {"lr": Scale(1e-3, 1.5), "with.decay": MOMENTA, "weight_decay": DECAY},
        ),
        "gradients": Method(
            "top-k of gradients with error feedback, 7 bits, AdamW", {
                **ADAMW, "scheme": "containers", "with": {"config": "topk_model", "density": 0.01},
            }, {"lr": LR, "weight_decay": DECAY, "beta2": BETA2},
        ),
        "powersgd": Method(
            "PowerSGD, rank 4, AdamW", {**ADAMW, "scheme": "powersgd", "with": {"rank": 4}},
            {"lr": LR, "weight_decay": DECAY, "beta2": BETA2},
        ),
        "one_bit": Method(
            "1-bit Adam, 15% of the steps dense",
            {"optimizer": "plain", "clip": 1.0, "clip_first": True, "scheme": "one_bit", "weight_decay": 0.1},
            {"lr": LR, "weight_decay": DECAY},
        ),
    }  # fmt: skip
    claims = (Claim("signs 0.7%", "dense", 0.02, 0.007), Claim("signs 0.25%", "dense", 0.05, 0.0025))
    return Contest(f"In each step, AdamW, {workers} workers", "gpt", workers, 2000, 500, 12, methods, claims)


BETA2 = Choice((0.9, 0.95, 0.98, 0.99, 0.995, 0.999), 0.99)
CONTESTS = {f"each-step-{workers}": in_each_step(workers) for workers in (2, 4, 8)}
