"""What presets lost under which optimizers: the numbers that a recommendation goes by, from the tables in docs/.

``tests/test_losses.py`` compares each number with its page.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import NamedTuple

from hvd_deepreduce.config import presets

SGD, ADAM = "sgd", "adam"
FAMILIES = {
    SGD: ("sgd", "momentum", "nesterov", "lars"),
    ADAM: (
        "adam", "adamw", "muon", "adafactor", "lamb", "adagrad", "adadelta", "adabelief", "rmsprop", "lion", "novograd",
        "shampoo", "soap", "sophia", "yogi", "ftrl", "adopt", "prodigy", "signsgd", "signum",
    ),
}  # fmt: skip
"""Optimizers, by how they take sparse gradients: those of ``ADAM`` divide a step by a running size of the gradients, or
change its size in another way. What waits in a residual arrives as rare, large elements, which they do not expect."""
NEVER_UNASKED = frozenset({"smallest", "diloco", "streaming_diloco", "sparseloco", "adamw_small"})
"""Presets that are recommended only where the user has named them. The first four lost most on a job below.
``adamw_small`` lost more than ``adamw_safe`` on both GPTs, and is at most some 1.4 times as fast."""


class Job(NamedTuple):
    """On which presets were measured.

    Attributes:
        family: of its optimizer.
        name: for the head of a column.
        about: for a sentence.
        unit: of what was lost.
        page: that has the table.
    """

    family: str
    name: str
    about: str
    unit: str
    page: str


JOBS = {
    "cnn": Job(SGD, "ResNet", "a ResNet on digits", "points", "docs/results/presets.md"),
    "lstm": Job(SGD, "LSTM", "an LSTM", "nats", "docs/results/arena.md"),
    "tuned": Job(SGD, "tuned ResNet", "a ResNet on digits on 4 ranks, tuned", "points", "docs/results/arena.md"),
    "gpt": Job(ADAM, "GPT", "a GPT in 400 steps of AdamW", "nats", "docs/results/presets.md"),
    "embedding": Job(ADAM, "NeuMF", "NeuMF under Adam", "points", "docs/results/presets.md"),
    "longer": Job(ADAM, "longer GPT", "a GPT in 2,000 steps of AdamW on 4 ranks", "nats", "docs/results/arena.md"),
}
"""The first one of a family has all presets, and is the one by which they are compared."""
LOST = {
    "cnn": {
        "recommended": -0.56, "fast": -0.42, "small": -0.14, "smallest": 0.0, "qsgd": -0.28,
        "reduce_scatter": 0.56, "dgc": 0.14, "adamw_safe": -0.42, "adamw_small": -0.42,
        "qsparse_local": -0.42, "sparseloco": 0.0, "diloco": 11.39, "streaming_diloco": 3.19,
    },
    "lstm": {
        "recommended": 0.103, "fast": 0.103, "smallest": 0.311, "dgc": 0.156, "adamw_safe": 0.034,
        "qsparse_local": 0.152, "sparseloco": 0.256,
    },
    "tuned": {"recommended": 0.44, "fast": 0.44, "dgc": 0.72},
    "gpt": {
        "recommended": 0.45, "fast": 0.45, "small": 0.51, "smallest": 0.67, "qsgd": 0.21,
        "adamw_safe": 0.10, "adamw_small": 0.26, "qsparse_local": 0.37, "diloco": 0.28, "streaming_diloco": 0.27,
    },
    "embedding": {
        "recommended": 28.5, "fast": 26.67, "small": 30.67, "smallest": 33.5, "qsgd": 1.5,
        "adamw_safe": 1.17, "adamw_small": 0.17, "qsparse_local": -0.5, "diloco": 2.33, "streaming_diloco": -0.17,
    },
    "longer": {
        "adamw_safe": 0.022, "adamw_small": 0.032, "sparseloco": 0.280, "diloco": 0.291, "sign_momentum": -0.010,
        "sign_momentum_small": -0.016,
    },
}  # fmt: skip
"""By job and preset: dense's result less the preset's, or the preset's loss less dense's; negative: it was better."""


def family_of(optimizer: str) -> str | None:
    """``SGD`` or ``ADAM``; None: not known. A class's name will do, such as ``FusedAdam`` or ``torch.optim.SGD``."""
    letters = "".join(one for one in optimizer.lower() if one.isalnum())
    # Where a name has both, as a hybrid's may, the one that compressed gradients harm counts.
    return next((family for family in (ADAM, SGD) if any(name in letters for name in FAMILIES[family])), None)


def families_of(optimizer: str | None) -> list[str]:
    """The family of an optimizer; of None, which is not known yet, all.

    Raises:
        ValueError: no optimizer has this name, and the message has the nearest one; or it is ``SignMomentum``.
    """
    if optimizer is None:
        return list(FAMILIES)
    if "signmomentum" in optimizer.lower().replace("_", ""):
        raise ValueError(
            f"the optimizer is {optimizer!r}, which is for the preset sign_momentum alone, so there is nothing to "
            "choose: use that preset. To predict its times, give the optimizer that it takes the place of, such as "
            "adamw, and --config sign_momentum"
        )
    if family := family_of(optimizer):
        return [family]
    known = [name for names in FAMILIES.values() for name in names]
    close = get_close_matches(optimizer.lower(), known, 1)
    raise ValueError(
        f"the optimizer is {optimizer!r}, which is not known{f'; did you mean {close[0]!r}' + '?' if close else '.'} "
        f"Known are {', '.join(known)}. For another one that scales its steps by the size of past gradients, give "
        "adam; for one whose step is proportional to the gradient, give sgd"
    )


def jobs_of(family: str) -> dict[str, Job]:
    """The jobs with an optimizer of this family. The first one is that by which presets are compared."""
    return {key: job for key, job in JOBS.items() if job.family == family}


def lost(job: str, preset: str) -> float | None:
    """What a preset lost in a job, under this name or as the preset that it is an alias of; None: not known."""
    return LOST[job].get(preset, LOST[job].get(presets.ALIASES.get(preset, "")))


def compared(preset: str, family: str) -> float:
    """What a preset lost, in the unit of the family's first job; infinity: it is not known."""
    found = lost(next(iter(jobs_of(family))), preset)
    return float("inf") if found is None else found


def told(preset: str, family: str) -> str:
    """A clause: what a preset lost under a family of optimizers, as far as the tables know."""
    found = {key: one for key in jobs_of(family) if (one := lost(key, preset)) is not None}
    if not found:
        return f"what {preset} loses was not measured"
    clauses = (
        f"{f'{one:.2g} {JOBS[key].unit}' if one > 0 else 'nothing'} on {JOBS[key].about}" for key, one in found.items()
    )
    return f"{preset} lost {', '.join(clauses)} ({', '.join(sorted({JOBS[key].page for key in found}))})"
