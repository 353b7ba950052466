"""The contests: jobs, methods with their knobs, and budgets, as plain data.

A knob's name is the path of a setting, as in ``with.decay``. A search begins with the published value of a knob, or
where the paper names none for such a job, with that of the nearest method.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tuning import Choice, Knobs, Scale, starting

from hvd_deepreduce import Config
from hvd_deepreduce.tools.measuring import entropy_bits


@dataclass(frozen=True)
class Method:
    """What is trained, and what is tuned.

    Attributes:
        words: for the tables.
        fixed: settings, by their paths.
        knobs: by their paths.
        share: bytes relative to dense that decide the density, whose path is ``density``, once ``every`` is known.
        value_bits: of a value that is sent.
        phases: whether the workers sum slices, and send the sums, with as many elements as they have sent; otherwise
            each sends its container to all others.
        blocks: the knob ``block`` is the elements of a block, of the sparsifier and of the index codec.
        published_bits: of an element that is sent, its index included, in the published format, where ours is smaller.
    """

    words: str
    fixed: Mapping[str, Any]
    knobs: Knobs
    share: float | None = None
    density: str = ""
    value_bits: float = 1.0
    phases: bool = False
    blocks: bool = False
    published_bits: int = 0

    def published_share(self, settings: Mapping[str, Any], workers: int) -> float:
        """The bytes relative to dense in the published format."""
        density: float = settings["config"]["sparsifier"]["density"]
        return density * self.published_bits * workers / 64 / settings["every"]

    def settings(self, point: Mapping[str, Any], workers: int) -> dict[str, Any]:
        """The settings of trainer.py at a point of the knobs."""
        settings: dict[str, Any] = {}
        for path, value in {**self.fixed, **point}.items():
            if not (self.blocks and path == "block"):
                put(settings, path, copy.deepcopy(value))
        block = point["block"] if self.blocks else 1
        if self.blocks:
            put(settings, "with.config.sparsifier.block", block)
            put(settings, "with.config.index.block", block)
        if self.share is not None:
            every = settings.get("every", 1)
            if self.phases:
                density = density_of(self.share * CLUSTERED.get(every, 1.0), 2, every, self.value_bits)
                put(settings, "config.exchange.density", density)
            else:
                density = density_of(self.share, workers, every, self.value_bits, block)
            put(settings, self.density, density)
        return settings


@dataclass(frozen=True)
class Claim:
    """What is said of a method, and checked.

    Attributes:
        method, reference: whose mean loss is compared, at equal seeds.
        most: the largest gap, in the contest's unit.
        share: the largest share of dense's bytes.
        least: the least gap: what is said is that the method is worse.
        source: who says it, with the published figure; empty: we.
        early: the results after a fifth of the steps are compared, of jobs that have them.
    """

    method: str
    reference: str
    most: float
    share: float = 1.0
    source: str = ""
    least: float = -math.inf
    early: bool = False


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
        tuning_seeds: of all searches. The first one is that of short trainings; of whole ones, the mean of all counts.
            One is not enough where the best rate is beside one that diverges for some seeds.
        settings_of: the contest whose best settings its methods have, so that only ``again`` is searched, with short
            trainings; nothing, if that is empty. Its methods have the same names, or the same up to a comma.
        unit: of what is compared: ``nats``, of the loss, or ``points``, of the accuracy, in hundredths.
        note: for the page.
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
    tuning_seeds: tuple[int, ...] = (100,)
    settings_of: str = ""
    unit: str = "nats"
    note: str = ""

    @property
    def reference(self) -> str:
        """The name of the method that the others are compared with."""
        return next(iter(self.methods))

    @property
    def repeats(self) -> bool:
        """Whether it judges the claims of another contest once more, and has no section of its own."""
        return not self.again

    def score(self, line: Mapping[str, Any]) -> float:
        """What is compared, less is better: the loss, or hundredths that the accuracy is below 1."""
        loss = loss_of(line)
        return 100 * (1 - line["accuracy"]) if self.unit == "points" and loss < math.inf else loss


def loss_of(line: Mapping[str, Any]) -> float:
    """The loss of a training, by which all searches choose, since it is finer than the accuracy, of which one image is
    0.1 or 0.28 points. Infinite for a training that diverged."""
    return math.inf if line["loss"] is None else line["loss"]


def put(settings: dict[str, Any], path: str, value: Any) -> None:
    """Writes a value to a path such as ``with.decay``; a part that is a mapping is made."""
    *folders, last = path.split(".")
    for folder in folders:
        settings = settings.setdefault(folder, {})
    settings[last] = value


def density_of(
    share: float, workers: int, every: int, value_bits: float, block: int = 1, numel: int = 1_000_000
) -> float:
    """The density at which a container a round takes this share of dense's bytes, of elements in blocks.

    A worker sends its container to each other one, in ``every`` steps once; dense's ring sends 2 (R - 1) / R of 32 bits
    an element in each step. Indices take as many bits as there are subsets.
    """
    budget = 64 * share * every / workers
    low, high = 1e-6, 1.0
    for _ in range(60):
        middle = math.sqrt(low * high)
        bits = entropy_bits(numel, max(1, round(middle * numel))) / numel / block + middle * value_bits
        low, high = (middle, high) if bits < budget else (low, middle)
    return float(f"{low:.3g}")


CLUSTERED = {1: 1.15, 2: 1.15, 4: 1.07}
"""Bytes by ``density_of`` relative to those of containers in phases, whose elements come in clusters, by the period:
the longer it is, the more elements are sent, and the less they do."""
FIVE = (0, 1, 2, 3, 4)
"""Seeds that are reported where a training takes about two minutes, or where three did not decide; otherwise three."""
LR = Scale(2.5e-3, 1.5)
DECAY = Choice((0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8), 0.1, (True, False))
BETA2 = Choice((0.9, 0.95, 0.98, 0.99, 0.995, 0.999), 0.99)
MOMENTA = Choice((0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999), 0.9, (True, False))
DEMO_DECAY = Choice((0.99, 0.998, 0.999, 1.0), 0.999, (False, True))
ADAMW = {"optimizer": "adamw", "clip": 1.0, "weight_decay": 0.1}
MUON = {"optimizer": "muon", "clip": 1.0, "weight_decay": 0.1}
SIGN = {"optimizer": "sign", "clip": 1.0, "clip_first": True, "weight_decay": 0.1}
BETA1 = Choice((0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99), 0.9, (True, False))
DENSE = {"lr": LR, "weight_decay": DECAY, "beta2": BETA2}
"""The knobs of dense AdamW. With 2 workers dense has ``beta1``, too; with 4 and 8 workers, searches found 0.8 after 500
steps, which was no better than 0.9 after 2,000."""
DENSITY = "config.sparsifier.density"
SIGNS_DECAY = "with.config.memory.decay"
"""Of the momentum whose signs are sent."""


def largest(value: str | dict[str, Any]) -> dict[str, Any]:
    """The config of the largest elements of the whole model, whose density is set later."""
    return {"sparsifier": {"name": "topk", "density": 0.01}, "index": "auto", "value": value, "scope": "model"}


def signs(share: float, block: int, decay: float) -> Method:
    """Signs of scaled momentum in each step, at a budget: the memory ``scaled_momentum`` and ``SignMomentum``.

    Args:
        block: elements that are chosen together, with which the search begins.
        decay: of the momentum, with which the search begins.
    """
    config = {
        "sparsifier": {"name": "block_topk", "norm": "l1"}, "index": {"name": "blocks"}, "scope": "model",
        "value": {"name": "sign", "magnitude": "one"}, "memory": {"name": "scaled_momentum", "clip": 1.0},
    }  # fmt: skip
    return Method(
        f"**signs of scaled momentum**, {share:.2%}",
        {"optimizer": "sign", "weight_decay": 0.1, "scheme": "containers", "with": {"config": config}},
        {"lr": Scale(8e-3, 1.4), SIGNS_DECAY: starting(MOMENTA, decay), "weight_decay": DECAY,
         "block": Choice((1, 2, 4, 8, 16, 32), block, (True, False))},
        share, f"with.{DENSITY}", blocks=True,
    )  # fmt: skip


def signs_in_phases(method: Method, density: float) -> Method:
    """Signs of momentum by ``reduce_scatter``, at a density whose bytes were measured: what the ranks have in common
    decides those of the second phase."""
    before = method.fixed["with"]["config"]
    sparsifier = {**before["sparsifier"], "density": density}
    config = {**before, "sparsifier": sparsifier, "exchange": {"name": "reduce_scatter"}}
    words = method.words.replace("momentum**", "momentum, in two phases**")
    return replace(method, words=words, fixed={**method.fixed, "with": {"config": config}}, share=None)


def updates_in_phases(share: float, inner: Mapping[str, Any], lr: Scale) -> Method:
    """As ``updates``: slices are summed, and the largest elements of the sums are sent once more, in signs. With eight
    workers an element takes a quarter of the bytes that it takes in an allgather. The search begins with the best
    settings of ``updates`` under Muon."""
    one = updates(share, inner, lr)
    config = {**one.fixed["config"], "exchange": {"name": "reduce_scatter"}}
    return replace(
        one, words=f"**signs of updates, in two phases**, {share:.2%}", phases=True,
        fixed={**one.fixed, "config": config},
        knobs={**one.knobs, "every": starting(EVERY, 2), "decay": starting(RESIDUAL, 0.95)},
    )  # fmt: skip


def updates(share: float, inner: Mapping[str, Any], lr: Scale) -> Method:
    """Signs of the largest elements of the updates of an inner optimizer, AdamW or another, at a budget."""
    return Method(
        f"**signs of updates**, {share:.2%}", {**inner, "config": largest("sign")},
        {"lr": lr, "every": EVERY, "decay": RESIDUAL, "weight_decay": DECAY}, share, DENSITY,
    )  # fmt: skip


EVERY = Choice((1, 2, 4, 8, 15, 30, 60), 4, (True, False))
PERIOD = Choice((1, 2, 4, 8, 15, 30, 60, 120, 250), 15, (True, False))
RESIDUAL = Choice((0.0, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0), 1.0, (True, True))
OUTER = {
    "outer_lr": Choice((0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5), 0.7),
    "outer_momentum": Choice((0.0, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95), 0.9, (True, False)),
}
ROUNDS = ("every", "outer_lr", "outer_momentum")
"""Knobs of local steps, whose optimum depends on the number of rounds."""
TWO_BITS = {"name": "quantile", "buckets": 4, "splits": "lloyd", "entropy": "rans"}


def sparse_loco(inner: Mapping[str, Any], share: float | None = None, every: int = 15) -> Method:
    """SparseLoCo with entropy-coded indices, at a budget, or with the published density and 15 local steps.

    Args:
        every: local steps, with which the search begins.
    """
    config = {
        "sparsifier": {"name": "chunk_topk", "density": 0.015625, "chunk": 4096}, "index": "auto", "value": TWO_BITS,
        "scope": "model",
    }  # fmt: skip
    knobs = {
        "lr": LR, **({"every": starting(PERIOD, every)} if share else {}),
        "decay": Choice((0.8, 0.9, 0.95, 0.98, 1.0), 0.95, (False, True)),
        "outer_lr": Choice((0.4, 0.6, 0.8, 1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0), 1.0),
        "weight_decay": DECAY,
    }  # fmt: skip
    return Method(
        f"SparseLoCo, indices of entropy-coded gaps, {f'{share:.2%}' if share else 'H = 15, 64 of 4,096'}",
        {**inner, "config": config, **({} if share else {"every": 15})}, knobs, share, DENSITY, 1.7, published_bits=14,
    )  # fmt: skip


def preset(name: str, inner: Mapping[str, Any], lr: Scale) -> Method:
    """A preset as it is, of which a user tunes the learning rate alone."""
    config = Config.load(name)
    settings: dict[str, Any] = {"scheme": "containers", "with": {"config": name}}
    if local := config.local:
        settings = {key: getattr(local, key) for key in ("every", "decay", "fragments", "delay")}
        settings |= {"config": name, "outer_lr": local.lr, "outer_momentum": local.momentum}
    return Method(f"preset `{name}`", {**inner, **settings}, {"lr": lr})


def in_one_bucket(inner: Mapping[str, Any], lr: Scale) -> Method:
    """The preset ``fast`` on a model of less than 25 MB, on which ``recommended`` selects and encodes the same."""
    return replace(preset("fast", inner, lr), words="preset `fast`: as `recommended`, since the model is one bucket")


DENSE_ADAMW = Method("dense, AdamW", {**ADAMW, "scheme": "dense"}, DENSE)


def demo(words: str, given: Mapping[str, Any]) -> Method:
    """DeMo, which sends so many coefficients of each chunk."""
    return Method(
        f"DeMo, {words} of 64 x 64", {**SIGN, "scheme": "demo", "with": {"chunk": 64, "decay": 0.999, **given}},
        {"lr": Scale(1e-3, 1.5), "weight_decay": DECAY, "with.decay": DEMO_DECAY},
    )  # fmt: skip


def demo_signs(share: float, workers: int) -> Method:
    """DeMo with signs at a budget, with as few bits for indices as ours have."""
    top = round(64 * 64 * density_of(share, workers, 1, 1.0))
    return demo(f"entropy-coded signs of the top {top}", {"top": top, "signs": True, "coded": True})


def in_each_step(title: str, workers: int, decay: float, rivals: bool = False) -> Contest:
    """AdamW's users, who exchange in each step.

    Args:
        decay: of the momentum, with which the search of signs begins.
        rivals: whether published methods take part; if not, presets of local steps.
    """
    knobs = {**DENSE, "beta1": BETA1} if rivals else DENSE
    methods = {
        "dense": replace(DENSE_ADAMW, knobs=knobs), "signs 0.7%": signs(0.007, 1, decay),
        "signs 0.25%": signs(0.0025, 8, decay),
    }  # fmt: skip
    if rivals:
        methods |= {
            "signum": Method(
                "dense, signs of momentum (Signum)", {**SIGN, "scheme": "dense"},
                {"lr": Scale(1e-3, 1.5), "with.momentum": MOMENTA, "weight_decay": DECAY},
            ),
            "demo": demo("top 16", {"top": 16}),
            "demo signs 0.7%": demo_signs(0.007, workers),
            "demo signs 0.25%": demo_signs(0.0025, workers),
            "one_bit": Method(
                "1-bit Adam, 15% of the steps dense",
                {"optimizer": "sgd", "clip": 1.0, "clip_first": True, "scheme": "one_bit"},
                {"lr": LR, "weight_decay": DECAY, "with.beta2": BETA2, "with.beta1": MOMENTA},
            ),
            "powersgd": Method("PowerSGD, rank 4, AdamW", {**ADAMW, "scheme": "powersgd", "with": {"rank": 4}}, DENSE),
            "gradients": Method(
                "top 1% of gradients with error feedback, 7 bits, AdamW",
                {**ADAMW, "scheme": "containers", "with": {"config": "fast"}}, DENSE,
            ),
        }  # fmt: skip
        for name in ("powersgd", "gradients"):
            one = methods[name]
            methods[f"{name}, beta1"] = replace(one, words=f"{one.words}, its beta1 tuned, too", knobs=knobs)
    else:
        methods |= {name: preset(name, ADAMW, LR) for name in ("adamw_safe", "adamw_small", "sparseloco", "diloco")}
        rate = Scale(1.12e-2, 1.4)
        methods |= {name: preset(name, SIGN, rate) for name in ("sign_momentum", "sign_momentum_small")}
    claims = [Claim("signs 0.7%", "dense", 0.02, 0.007), Claim("signs 0.25%", "dense", 0.05, 0.0025)]
    if rivals:
        claims += [Claim(f"signs {share}", f"demo signs {share}", 0.0) for share in ("0.7%", "0.25%")]
    seeds = FIVE if rivals else (0, 1, 2)
    again = ("lr", "beta1", "with.beta1")
    tuning_seeds = (100, 101) if rivals else (100,)
    return Contest(title, "gpt", workers, 2000, 500, 20, methods, tuple(claims), again, seeds, tuning_seeds)


def from_eight(
    title: str, job: str, workers: int, steps: int, seeds: tuple[int, ...], most: float, again: tuple[str, ...],
    note: str = "", phases: float = 0.0,
) -> Contest:  # fmt: skip
    """The best of ``adamw-8`` with its settings, on a larger job.

    Args:
        most: the largest gap to dense that is claimed.
        again: knobs that are searched. With whole trainings: with 8 workers the best rate of signs after 500 steps is
            half of that after 2,000.
        phases: the density of signs in two phases; 0: without them.
    """
    methods = {name: method for name, method in local_adamw(8).methods.items() if name in BEST}
    ours = ["signs 0.7%"]
    if phases:
        ours.append("signs 0.7%, in phases")
        methods[ours[1]] = signs_in_phases(methods["signs 0.7%"], phases)
    bounds = (("dense", most, 0.007), ("sparseloco 1.6%", 0.0, 0.008))
    claims = tuple(Claim(name, *bound) for name in ours for bound in bounds)
    return Contest(
        title, job, workers, steps, steps, 14, methods, claims, again, seeds, settings_of="adamw-8", note=note
    )


BEST = ("dense", "signs 0.7%", "sparseloco 1.6%")
"""Of 8 workers under AdamW."""


def local_adamw(workers: int) -> Contest:
    """AdamW with local steps, and signs of scaled momentum in each step."""
    methods = {
        "dense": DENSE_ADAMW,
        "signs 0.7%": signs(0.007, 1, 0.98),
        "sparseloco 1.6%": sparse_loco(ADAMW, 0.016),
        "updates 0.8%": updates(0.008, ADAMW, Scale(5e-3, 1.4)),
        "averaged": Method("local steps, updates in float32", ADAMW, {"lr": LR, "every": EVERY, "weight_decay": DECAY}),
        "diloco": Method("DiLoCo, H = 15", {**ADAMW, "every": 15}, {"lr": LR, **OUTER, "weight_decay": DECAY}),
        "sparseloco": sparse_loco(ADAMW),
    }
    claims = (
        Claim("signs 0.7%", "dense", 0.015, 0.007), Claim("signs 0.7%", "sparseloco 1.6%", 0.0, 0.008),
        Claim("updates 0.8%", "dense", 0.015, 0.008), Claim("updates 0.8%", "sparseloco 1.6%", 0.0, 0.008),
        Claim("sparseloco", "diloco", 0.0, source="SparseLoCo: ahead of DiLoCo with equal local steps; here 15"),
    )  # fmt: skip
    trials = 44  # at 30, SparseLoCo's search ended before the neighbours of its best decay were tried
    return Contest(f"AdamW, {workers} workers", "gpt", workers, 2000, 500, trials, methods, claims, ("lr", *ROUNDS))


def local_muon(workers: int) -> Contest:
    """Muon with local steps."""
    two_bits = {
        "sparsifier": "none", "value": TWO_BITS, "scope": "model", "selection": "tensor", "exchange": "reduce_scatter"
    }  # fmt: skip
    outer = {"outer_lr": starting(OUTER["outer_lr"], 0.9), "outer_momentum": starting(OUTER["outer_momentum"], 0.8)}
    methods = {
        "dense": Method("dense, Muon", {**MUON, "scheme": "dense"}, DENSE),
        "updates 0.8%": updates_in_phases(0.008, MUON, Scale(0.0427, 1.5)),
        "sparseloco 1.6%": sparse_loco(MUON, 0.016, 4),
        "muloco": Method(
            "MuLoCo: all elements in 2 bits, in two phases", {**MUON, "config": two_bits},
            {"lr": LR, "every": starting(PERIOD, 30), **outer, "decay": starting(RESIDUAL, 0.9),
             "weight_decay": DECAY},
        ),
    }  # fmt: skip
    half = 0.0083  # of what SparseLoCo sends at its budget of 1.6%: its containers are a bit larger than computed, too
    claims = (Claim("updates 0.8%", "dense", 0.015, half), Claim("updates 0.8%", "sparseloco 1.6%", 0.0, half))
    momenta = Choice((0.8, 0.9, 0.95, 0.98), 0.95)
    methods = {
        name: replace(one, knobs={**one.knobs, "momentum": starting(momenta, 0.9 if one.phases else 0.95)})
        for name, one in methods.items()
    }
    trials = 100  # at 40, 44 and 60, searches ended before the neighbours of the best decays were tried
    return Contest(f"Muon, {workers} workers", "gpt", workers, 2000, 500, trials, methods, claims, ("lr", *ROUNDS))


def delayed() -> Contest:
    """Updates that are applied while the next ones are made: what a slow network costs nothing but accuracy."""

    def late(words: str, **more: int) -> Method:
        knobs = {"lr": Scale(3.5e-3, 1.4), "decay": starting(RESIDUAL, 0.98)}
        return Method(words, {**ADAMW, "config": "adamw_small", "every": 15, **more}, knobs)

    methods = {
        "at once": late("`adamw_small`, updates every 15 steps"),
        "late": late("the same, applied 4 steps later", delay=4),
        "late, in parts": late("the same in 3 fragments, applied 4 steps later", delay=4, fragments=3),
    }
    claims = (Claim("late", "at once", 0.01), Claim("late, in parts", "at once", 0.01))
    return Contest(
        "LocalSGD with a delay, AdamW, 4 workers", "gpt", 4, 2000, 500, 12, methods, claims, again=("lr", "decay")
    )


IMAGES = {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 5e-4}
IMAGE_RATE = {"lr": Scale(0.05, 2.0)}


def sent(words: str, config: str | dict[str, Any], ours: bool = False) -> Method:
    """Gradients of a classifier in the containers of a config."""
    scheme = {"scheme": "containers", "with": {"config": config}}
    return Method(f"**{words}**" if ours else words, {**IMAGES, **scheme}, IMAGE_RATE)


def bloom(policy: str, density: float) -> dict[str, Any]:
    """Raw values of the largest elements of each tensor, and the paper's Bloom filter."""
    return {
        "sparsifier": {"name": "topk", "density": density}, "value": "raw", "scope": "tensor",
        "index": {"name": "bloom", "policy": policy, "fpr": 0.001, "tries": 1},
    }  # fmt: skip


def policies(density: float) -> dict[str, Method]:
    """DeepReduce's policies, and top-r alone; with and without error feedback, which refuses the naive policy."""
    top = {"sparsifier": {"name": "topk", "density": density}, "index": "raw", "value": "raw", "scope": "tensor"}
    found = {
        "dense": Method("dense", {**IMAGES, "scheme": "dense"}, IMAGE_RATE),
        "Top-r": sent("Top-r", top),
        **{f"BF-{policy}": sent(f"BF-{policy}", bloom(policy.lower(), density)) for policy in ("P0", "P1", "P2")},
    }
    return found | {
        f"{name}, no feedback": sent(f"{name}, without error feedback", {**config, "error_feedback": False})
        for name, config in (
            ("Top-r", top), ("BF-P0", bloom("p0", density)), ("BF-naive", bloom("naive", density)),
        )
    }  # fmt: skip


MUCH = (
    'How much of its accuracy the naive policy has to lose for "much" is not in the paper: it was 5 points here before '
    "the first trainings, and is 1 point since."
)


def failing(source: str) -> Claim:
    """Of the naive policy, beside the same elements with their own values: what error feedback would change is in
    neither."""
    return Claim("BF-naive, no feedback", "Top-r, no feedback", math.inf, source=source, least=1.0)


def figure_7() -> Contest:
    """DeepReduce, Figures 7, 8 and 9."""
    methods = policies(0.01) | {
        "Fit-Poly": sent("Fit-Poly, 32-bit keys", "dr_fit_poly"),
        "Fit-DExp": sent("Fit-DExp, 32-bit keys", "dr_fit_dexp"),
        "QSGD": sent("QSGD", "dr_qsgd"),
        "3LC": sent("3LC", "three_lc"),
        "SketchML": sent("SketchML, 64 buckets, of the dense gradient", {
            "joint": {"name": "sketchml", "buckets": 64, "center": "middle"}, "sparsifier": "nonzero",
            "scope": "tensor",
        }),
        "ours": sent("`recommended`", "recommended", True),
    }  # fmt: skip
    said = "DeepReduce, Figure 7: "
    claims = (
        *(
            Claim(name, "dense", 0.5, source=f"{said}reaches the baseline")
            for name in ("Top-r", "BF-P0", "BF-P1", "BF-P2")
        ),
        Claim("BF-P2", "Top-r", 0.0, source=f"{said}P2 converges faster than Top-r", early=True),
        Claim("BF-P2", "BF-P0", 0.0, source=f"{said}P2 converges fastest, beside P0; its caption says P0", early=True),
        Claim("BF-P2", "BF-P1", 0.0, source=f"{said}P2 converges fastest, beside P1", early=True),
        failing(f"{said}much lower accuracy than without false positives"),
        *(
            Claim(name, "dense", 0.5, source="DeepReduce, Figure 8: reaches the baseline")
            for name in ("Fit-Poly", "Fit-DExp")
        ),
        *(
            Claim(name, "Top-r", 0.0, source="DeepReduce, Figure 8: converges in fewer steps than Top-r", early=True)
            for name in ("Fit-Poly", "Fit-DExp")
        ),
        Claim("Fit-DExp", "Fit-Poly", 0.0, source="DeepReduce, Figure 8: slightly ahead of Fit-Poly", early=True),
        *(
            Claim("3LC", other, math.inf, source=f"DeepReduce, Figure 9: 3LC loses most; beside {other}", least=0.0)
            for other in ("BF-P2", "Fit-Poly", "SketchML")
        ),
        *(
            Claim("SketchML", other, 0.0, source=f"DeepReduce, Figure 9: SketchML loses least; beside {other}")
            for other in ("BF-P2", "Fit-Poly")
        ),
        *(
            Claim(name, "Top-r", 0.0, source="DeepReduce, Figure 9: ahead of Top-r, by 0.7 points (appendix)")
            for name in ("BF-P2", "Fit-Poly")
        ),
        Claim("ours", "dense", 0.5),
    )
    note = (
        "The top 1% of each tensor; a false positive rate of 0.001; values in float32 but where a codec is named. The "
        "paper trains ResNet-20 on CIFAR-10, and for Figure 9 ResNet-50 on ImageNet. Deflate loses nothing, so that it "
        f"trains as Top-r. {MUCH}"
    )
    return Contest(
        "DeepReduce on a ResNet", "resnet", 4, 1116, 372, 6, methods, claims, seeds=FIVE, unit="points", note=note,
    )  # fmt: skip


def figure_17() -> Contest:
    """DeepReduce, Figure 15b, and Figure 17b of the appendix."""
    methods = {name: one for name, one in policies(0.005).items() if name not in ("BF-P1", "BF-P0, no feedback")}
    same = "DeepReduce, Figure 15b: reaches the baseline"
    claims = (
        *(Claim(name, "dense", 0.5, source=same) for name in ("Top-r", "BF-P0", "BF-P2")),
        Claim("BF-P2", "BF-P0", 0.0, source="DeepReduce, appendix: P2 is consistently better than P0"),
        failing("DeepReduce, Figure 15b: much lower accuracy than without false positives"),
    )
    return Contest(
        "DeepReduce on a DenseNet", "densenet", 4, 1116, 372, 6, methods, claims, seeds=FIVE, unit="points",
        note=f"The top 0.5% of each tensor. The paper trains DenseNet40-K12 on CIFAR-10. {MUCH}",
    )  # fmt: skip


WARM_UP = [[0.011, 0.25], [0.022, 0.0625], [0.033, 0.015625], [0.044, 0.004]]
"""DGC's of the density: its ends, in shares of the steps, as four of 90 epochs."""


def sgd(inner: Mapping[str, Any], lr: Scale, shares: Mapping[str, float]) -> dict[str, Method]:
    """SGD with momentum: PowerSGD, DGC, and the largest elements of gradients.

    Args:
        inner: the optimizer.
        lr: its knob.
        shares: budgets of ours, by the name of a method.
    """
    inner = {"optimizer": "sgd", "momentum": 0.9, **inner}
    knobs = {"lr": lr, "momentum": Choice((0.0, 0.5, 0.8, 0.9, 0.95, 0.98), 0.9, (True, False))}

    def ours(share: float, words: str, knobs: Knobs, optimizer: Mapping[str, Any], **more: Any) -> Method:
        levels = {"name": "qsgd", "bits": 4, "entropy": "rans"}
        config = {"scheme": "containers", "with": {"config": {**largest(levels), **more}}}
        return Method(
            f"**top-k of {words}, 4 bits**, {share:.2%}", {**optimizer, **config}, knobs, share,
            f"with.{DENSITY}", 3.0,
        )  # fmt: skip

    own = {**inner, "momentum": 0.0}
    velocity = {"lr": lr, "with.config.memory.momentum": starting(MOMENTA, 0.9)}
    dgc = {
        "sparsifier": {"name": "topk", "density": 0.001}, "index": "rice", "value": "raw", "scope": "model",
        "memory": {"name": "dgc", "clip": inner.get("clip")},
    }  # fmt: skip
    return {
        "dense": Method("dense", {**inner, "scheme": "dense"}, knobs),
        **{
            f"powersgd {rank}": Method(
                f"PowerSGD, rank {rank}", {**inner, "scheme": "powersgd", "with": {"rank": rank}}, knobs
            )
            for rank in (1, 4)
        },
        "dgc": Method(
            "DGC: top 0.1%, momentum correction, a warm-up of the density",
            {**own, "scheme": "containers", "with": {"config": dgc, "warm_up": WARM_UP}}, velocity,
        ),
        **{name: ours(share, "gradients", knobs, inner) for name, share in shares.items()},
        **{
            f"{name}, velocity": ours(share, "DGC's velocities", velocity, own, memory={"name": "dgc"})
            for name, share in shares.items()
        },
    }  # fmt: skip


def sgd_lstm() -> Contest:
    """An LSTM that dense has not saturated, beside PowerSGD at its bytes and at half of them."""
    shares = {"ours 3.8%": 0.038, "ours 1.9%": 0.019, "ours 1.4%": 0.014}
    clip, lr = {"clip": 0.25}, Scale(1.5, 1.5)
    methods = sgd(clip, lr, shares)
    methods["dense, velocity"] = Method(
        "dense, clipped after its momentum, as velocities are", {"optimizer": "sgd", **clip, "scheme": "dense"},
        {"lr": lr, "with.momentum": starting(MOMENTA, 0.9)},
    )
    inner = {"optimizer": "sgd", "momentum": 0.9, **clip}
    methods["fast"] = in_one_bucket(inner, lr)
    for name in ("smallest", "adamw_safe", "qsparse_local", "sparseloco"):
        methods[name] = preset(name, inner, lr)
    claims = (
        Claim("ours 3.8%", "powersgd 4", 0.0), Claim("ours 1.9%", "powersgd 4", 0.0),
        Claim("ours 1.4%", "powersgd 1", 0.0),
    )  # fmt: skip
    return Contest("SGD with momentum, an LSTM, 4 workers", "lstm", 4, 1000, 250, 20, methods, claims, seeds=FIVE)


def sgd_digits() -> Contest:
    """A ResNet that dense saturates: at half of the bytes of PowerSGD of rank 4."""
    inner, lr = {"weight_decay": 5e-4}, Scale(0.02, 1.5)
    methods = sgd(inner, lr, {"ours 1.4%": 0.014})
    methods["fast"] = in_one_bucket({"optimizer": "sgd", "momentum": 0.9, **inner}, lr)
    claims = (Claim("ours 1.4%", "dense", 0.5, 0.0146), Claim("ours 1.4%, velocity", "dense", 0.5, 0.0146),
              Claim("powersgd 4", "dense", 0.5))  # fmt: skip
    return Contest(
        "SGD with momentum, a ResNet on digits, 4 workers", "digits", 4, 300, 150, 16, methods, claims,
        seeds=tuple(range(10)), unit="points",
    )  # fmt: skip


CONTESTS = {
    "each-step-2": in_each_step("In each step, AdamW, 2 workers", 2, 0.9, rivals=True),
    "each-step-4": in_each_step("AdamW, 4 workers, and presets of local steps", 4, 0.98),
    "adamw-8": local_adamw(8),
    "adamw-16": from_eight(
        "AdamW, 16 workers", "gpt", 16, 2000, FIVE, 0.03, ("lr", "decay", SIGNS_DECAY, "beta2", *ROUNDS),
        "A container has half of the bytes that it has with 8 workers, so an element waits longer until it is sent: "
        "decays are searched too, and what depends on the length. In two phases, slices of the votes are summed, and "
        "the signs of the sums sent to all.", 0.0036,
    ),
    "adamw-8-large": from_eight("AdamW, 8 workers, 2.4 M parameters", "gpt-large", 8, 1000, (0,), 0.015, ("lr",)),
    "delay-4": delayed(),
    "muon-8": local_muon(8),
    "sgd-lstm-4": sgd_lstm(),
    "sgd-digits-4": sgd_digits(),
    "deepreduce-resnet": figure_7(),
    "deepreduce-densenet": figure_17(),
}


ONCE_MORE = "-again"
"""Behind the name of a contest: its claims once more."""


def once_more(name: str) -> Contest:
    """The methods that a contest's claims are about, with their best settings, and with as many other seeds."""
    one = CONTESTS[name]
    claimed = {method for claim in one.claims for method in (claim.method, claim.reference)}
    methods = {method: given for method, given in one.methods.items() if method in claimed}
    seeds = tuple(range(10, 10 + len(one.seeds)))
    return replace(one, methods=methods, settings_of=name, again=(), seeds=seeds, short=one.steps)


CONTESTS |= {
    f"{name}{ONCE_MORE}": once_more(name) for name in ("each-step-2", "each-step-4", "sgd-lstm-4", "sgd-digits-4")
}  # fmt: skip
