"""Bits until a target is reached: Qsparse-local-SGD, what it was compared with, and our codecs with outer momentum.

    python scripts/papers/qsparse_bits.py softmax --write
    python scripts/papers/qsparse_bits.py digits --write

All workers run in one process (scripts/train/local_updates.py). Bits are those that all workers together send to a
master, counted in two ways: as the paper counts (`paper_bits`), and those of the containers that were really made. Each
method runs with each step size of a grid, and for each target its best one counts: the one that reaches this target in
the fewest steps, mean over the seeds. One at the edge of the grid has no figure. A target is reached at the first
evaluation that meets it.
"""

import json
import math
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("dev", "train"))

import doc_sections
import figure_kit
import matplotlib
import numpy as np
import typer
from local_problems import DigitsResNet, Problem, Softmax
from local_updates import LocalUpdates, Outer, own_times
from rich.progress import track
from simulated_ranks import SimulatedRanks

from hvd_deepreduce import Config

DOC = figure_kit.RESULTS / "schemes.md"
DENSE: dict[str, Any] = {"sparsifier": "none", "value": "raw", "error_feedback": False}


@dataclass(frozen=True)
class Method:
    """A way to send updates.

    Attributes:
        name: in tables.
        config: a preset, or settings.
        share: of the model's elements that a container holds, in (0, 1].
        value_bits: of a value, as the paper counts.
        every: H, local steps between synchronisations.
        decay, outer_lr, outer_momentum: see scripts/train/local_updates.py.
        changes: of the config.
        asynchronous: workers synchronise at times of their own, whose gaps are uniform in 1 .. H.
        ours: no method of the paper.
    """

    name: str
    config: str | None
    share: float
    value_bits: int
    every: int = 1
    decay: float = 1.0
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    changes: dict[str, Any] = field(default_factory=dict)
    asynchronous: bool = False
    ours: bool = False

    def job(self, problem: Problem, workers: int, seed: int) -> SimulatedRanks:
        """The workers, with one container of the whole model."""
        changes = {"scope": "model", "seed": seed, **self.changes}
        if self.share < 1:
            changes["sparsifier"] = {"name": "topk_capped", "cap": self.kept(sum(problem.sizes))}
        return SimulatedRanks(
            Config.load(DENSE if self.config is None else self.config, **changes), workers, problem.sizes
        )

    def kept(self, numel: int) -> int:
        """Elements of a container, of ``numel``."""
        return max(1, int(self.share * numel))

    def paper_bits(self, numel: int) -> int:
        """Bits of one worker's message as the paper counts: each value, each index, and a scale if values have one."""
        index = math.ceil(math.log2(numel)) if self.share < 1 else 0
        return self.kept(numel) * (self.value_bits + index) + (32 if self.value_bits < 32 else 0)


class Point(NamedTuple):
    """One evaluation: after which step, bits of all workers so far in both counts, objective, test error."""

    step: int
    paper_bits: float
    sent_bits: float
    loss: float
    error: float


@dataclass(frozen=True)
class Setting:
    """An experiment.

    Attributes:
        workers: R.
        steps: of each worker, at most.
        look: evaluations are at the first synchronisation after so many steps.
        rates: step sizes that are tried, ascending.
        a: of the step size rate * a / (a + t), as in Theorem 2.
        error, loss: targets.
    """

    workers: int
    steps: int
    look: int
    rates: tuple[float, ...]
    a: float
    error: float
    loss: float


def train(
    problem: Problem, method: Method, setting: Setting, rate: float, seed: int, most: float = math.inf
) -> list[Point]:
    """Trains until both targets are reached, or ``most`` steps or all are done."""
    rng = np.random.default_rng(seed)
    job = method.job(problem, setting.workers, seed)
    updates = LocalUpdates(job, problem.start(seed), method.decay, Outer(method.outer_lr, method.outer_momentum))
    gradients, velocity = np.zeros_like(updates.local), np.zeros_like(updates.local)
    times = own_times(setting.workers, setting.steps, method.every, seed) if method.asynchronous else None
    curve: list[Point] = []
    messages, looked = 0, 0
    for step in range(setting.steps):
        problem.gradients(updates.local, rng, gradients)
        direction = gradients
        if problem.momentum:
            velocity *= np.float32(problem.momentum)
            velocity += gradients
            direction = velocity
        updates.local -= np.float32(rate * setting.a / (setting.a + step)) * direction
        present = range(setting.workers) if (step + 1) % method.every == 0 else range(0)
        present = present if times is None else np.flatnonzero(times[step]).tolist()
        if not present:
            continue
        updates.synchronise(present)
        messages += len(present)
        if step + 1 - looked >= setting.look:
            looked = step + 1
            loss, error = problem.evaluate(updates.master)
            if not math.isfinite(loss):
                break
            bits = float(messages * method.paper_bits(updates.master.size))
            curve.append(Point(step + 1, bits, 8.0 * job.container_bytes, loss, error))
            both = reached(curve, "loss", setting.loss) and reached(curve, "error", setting.error)
            if both or step + 1 >= most:
                break
    return curve


def reached(curve: Sequence[Point], key: str, target: float) -> Point | None:
    """The first point that meets the target."""
    return next((point for point in curve if getattr(point, key) <= target), None)


def of_the_paper(share: float) -> list[Method]:
    """The methods that the paper compares, each with H = 1, 4 and 8, and one with workers at times of their own."""
    kinds = (
        Method("SGD", None, 1.0, 32),
        Method("Top_k", "topk_raw", share, 32, changes={"index": "packed"}),
        Method("EF-SignSGD", "ef_signsgd", 1.0, 1),
        # As the page's rows were measured: each norm is fitted to its levels. The preset divides by 1 + beta (lemma 1).
        Method("Q o Top_k", "qsparse_qtopk", share, 4, changes={"value": {"bucket_size": 512, "scaled": False}}),
        Method("SignTop_k", "signtopk", share, 1),
    )
    methods = [replace(kind, every=every) for kind in kinds for every in (1, 4, 8)]
    return [*methods, Method("SignTop_k, asynchronous", "signtopk", share, 1, 8, asynchronous=True)]


def ours(name: str, share: float, every: int, momentum: float, value: str | dict[str, Any], bits: int) -> Method:
    """Top-k with the smallest index codec, H local steps, and outer momentum."""
    changes = {"index": "auto", "value": value}
    return Method(name, "fast", share, bits, every, outer_momentum=momentum, changes=changes, ours=True)


def levels(bits: int) -> dict[str, Any]:
    """QSGD with entropy-coded levels."""
    return {"name": "qsgd", "bits": bits, "entropy": "rans"}


@dataclass
class Result:
    """What a method needed until a target, at the step size that is best for it: the curves of each seed.

    Attributes:
        key, target: of a ``Point``: ``loss`` or ``error``.
        at_edge: the grid has no larger, or no smaller step size, so the best one may be outside.
    """

    method: Method
    key: str
    target: float
    rate: float
    curves: list[list[Point]]
    at_edge: bool = False

    def needed(self, what: str) -> float | None:
        """The mean of a field of the points that meet the target; None if a seed does not reach it."""
        points = [reached(curve, self.key, self.target) for curve in self.curves]
        found = [getattr(point, what) for point in points if point is not None]
        return float(np.mean(found)) if len(found) == len(points) else None


def best(problem: Problem, method: Method, setting: Setting, seeds: int) -> tuple[Result, Result]:
    """Trains with each step size and seed: the result for the loss, and that for the error.

    The grid is tried from its middle on. A training stops at 1.25 times the steps that the best step size took.
    """
    rates, tried = setting.rates, list[tuple[Result, Result]]()
    middle = rates[len(rates) // 2]

    def steps(result: Result) -> float:
        return result.needed("step") or math.inf

    for rate in sorted(rates, key=lambda one: abs(math.log(one / middle))):
        least = [min((steps(pair[number]) for pair in tried), default=math.inf) for number in (0, 1)]
        curves = [train(problem, method, setting, rate, seed, 1.25 * max(least)) for seed in range(seeds)]
        targets = (("loss", setting.loss), ("error", setting.error))
        loss, error = (Result(method, *one, rate, curves, rate in (rates[0], rates[-1])) for one in targets)
        tried.append((loss, error))
    found = min((pair[0] for pair in tried), key=steps), min((pair[1] for pair in tried), key=steps)
    for one in found:
        edge = ", at the edge" if one.at_edge else ""
        print(f"{method.name}, H {method.every}: {one.key}: rate {one.rate:g}{edge}, {steps(one)} steps", flush=True)
    return found


def short(number: float) -> str:
    """Three digits, or all of a large number's."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def table(results: Sequence[tuple[Result, Result]]) -> str:
    """Markdown: bits in both counts, and how many times fewer they are than those of SGD and Top_k with H = 1."""
    first = {pair[0].method.name: pair for pair in reversed(results) if pair[0].method.every == 1}
    loss, error = (one.target for one in results[0])
    head = [
        "method", "H", "rate", f"steps to loss {loss:g}", "as the paper counts", "really sent", "SGD / this",
        "Top_k / this", "rate for the error", f"steps to test error {error:g}", "really sent until then", "SGD / that",
        "Top_k / that",
    ]  # fmt: skip

    def cells(number: int, pair: tuple[Result, Result], *counts: str) -> list[str]:
        one = pair[number]
        if one.at_edge or one.needed("step") is None:
            return ["at the edge" if one.at_edge else "not reached", *[""] * (3 + len(counts))]
        bits = [one.needed(count) or math.nan for count in counts]
        bases = [None if base.at_edge else base.needed("sent_bits") for base in (first[name][number] for name in BASES)]
        times = [f"{short(base / bits[-1])}x" if base else "" for base in bases]
        return [f"{one.rate:.3g}", f"{one.needed('step'):.0f}", *(f"{short(part / 1e6)} Mbit" for part in bits), *times]

    lines = []
    for pair in results:
        method = pair[0].method
        name = f"**{method.name}**" if method.ours else method.name
        every = f"1 to {method.every}" if method.asynchronous else str(method.every)
        lines.append([name, every, *cells(0, pair, "paper_bits", "sent_bits"), *cells(1, pair, "sent_bits")])
    return doc_sections.table(head, lines, right=True)


def draw(results: Sequence[tuple[Result, Result]], path: Path) -> None:
    """Objective and test error against bits, mean of the seeds, logarithmic bits."""
    shown = [pair for pair in results if pair[0].method.every in (1, 8) or pair[0].method.ours]
    figure, both = figure_kit.picture(2, width=14, height=4.6)

    def name(method: Method) -> tuple[Any, ...]:
        """Results that have one colour."""
        return method.name, method.ours and method.every

    names = list(dict.fromkeys(name(pair[0].method) for pair in shown))
    colors = [color for half in (0, 1) for color in matplotlib.colormaps["tab20"].colors[half::2]]
    for axes, results_of_one in zip(both, zip(*shown, strict=True), strict=True):
        for one in results_of_one:
            method, points = one.method, min(map(len, one.curves))
            if points:
                mean = Point(*np.array([curve[:points] for curve in one.curves]).mean(0).T)
                axes.plot(
                    mean.sent_bits, getattr(mean, one.key), color=colors[names.index(name(method))],
                    lw=2 if method.ours else 1.2, ls="-" if method.every == 1 or method.ours else "--",
                    label=f"{method.name}, H = {method.every}",
                )  # fmt: skip
        axes.axhline(one.target, color="grey", lw=0.8)
        axes.set(xscale="log", xlabel="bits that all workers have sent, in containers")
    loss, error = (one.target for one in results[0])
    both[0].set(ylabel="training objective", ylim=(0.6 * loss, 10 * loss))
    both[1].set(ylabel="test error", ylim=(0, 5 * error))
    figure.legend(*both[1].get_legend_handles_labels(), fontsize=8, frameon=False, loc="outside right center")
    figure_kit.save(figure, path)


RATES = (0.15, 0.19, 0.24, 0.3, 0.38, 0.48, 0.6, 0.76, 0.95, 1.2, 1.5, 1.9, 2.4, 3.0, 3.8)
BASES = ("SGD", "Top_k")
"""With H = 1: what the others are compared with."""
SETTINGS = {
    "softmax": Setting(15, 2000, 8, RATES, 1000, 0.11, 0.25),
    "digits": Setting(4, 320, 8, (0.005, 0.008, *(rate / 12 for rate in RATES[::2])), 500, 0.03, 0.05),
}
OURS = {
    "softmax": [
        Method("dense, outer momentum", None, 1.0, 32, 8, outer_momentum=0.5, ours=True),
        ours("top 1%, signs", 0.01, 16, 0.5, "sign", 1),
        ours("top 1%, signs, momentum 0.7", 0.01, 16, 0.7, "sign", 1),
        ours("top 1%, signs", 0.01, 32, 0.5, "sign", 1),
        ours("top 1%, 3 bits", 0.01, 32, 0.5, levels(3), 3),
        ours("top 1%, signs", 0.01, 64, 0.5, "sign", 1),
        ours("top 2%, signs", 0.02, 64, 0.5, "sign", 1),
    ],
    "digits": [
        ours("top 1%, signs", 0.01, 8, 0.5, "sign", 1),
        ours("top 1%, 3 bits", 0.01, 8, 0.5, levels(3), 3),
        ours("top 1%, signs", 0.01, 16, 0.3, "sign", 1),
        ours("top 3%, signs", 0.03, 16, 0.3, "sign", 1),
        ours("top 0.3%, signs", 0.003, 8, 0.3, "sign", 1),
    ],
}  # fmt: skip
TITLES = {"softmax": "softmax regression", "digits": "the digits ResNet"}
SEEDS = 3
"""Of the page, which explains the experiments and the table."""


def make(experiment: str, quick: bool) -> tuple[Problem, Setting, list[Method]]:
    """The problem, its setting and the methods. Quick: few steps of few methods, on small data."""
    setting = SETTINGS[experiment]
    problem: Problem
    if experiment == "softmax":
        from mnist import mnist_5k

        problem = Softmax(mnist_5k(), setting.workers)
    else:
        problem = DigitsResNet(setting.workers, 16, 4 if quick else 16)
    methods = [*of_the_paper(0.01), *OURS[experiment]]
    if quick:
        setting = Setting(setting.workers, 24, 8, setting.rates[:3], setting.a, 0.9, 2.3)
        methods = [method for method in methods if method.every != 4][::2]
    return problem, setting, methods


def main(
    experiment: Annotated[Literal["softmax", "digits"], typer.Argument(help="what is trained")],
    seeds: Annotated[int, typer.Option(min=1)] = SEEDS,
    quick: Annotated[bool, typer.Option("--quick", help="few steps of few methods, to try the script")] = False,
    write: Annotated[bool, typer.Option("--write", help="write docs/results/schemes.md and its picture")] = False,
    out: Annotated[Path, typer.Option(help="folder for results.json and the picture")] = Path("runs/qsparse"),
) -> None:
    """Trains with all methods, and prints the table."""
    if write and (quick or seeds != SEEDS):
        raise typer.BadParameter(f"--write is for {SEEDS} seeds and all steps, of which {DOC.name} tells")
    problem, setting, methods = make(experiment, quick)
    with ProcessPoolExecutor(figure_kit.processes) as pool:
        found = pool.map(partial(best, problem, setting=setting, seeds=seeds), methods)
        results = list(track(found, experiment, len(methods)))
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{experiment}.json").write_text(json.dumps([list(map(asdict, pair)) for pair in results]))
    report(experiment, results, out, write)


def report(name: str, results: Sequence[tuple[Result, Result]], out: Path, write: bool) -> None:
    """Prints the table and draws the picture; or writes the section of docs/results/schemes.md as well."""
    text = table(results)
    draw(results, (DOC.parent / "figures" if write else out) / f"qsparse_{name}.png")
    print(text)
    if write:
        parts = [text, f"![bits against objective and test error](figures/qsparse_{name}.png)"]
        dated = f"*{date.today()}, scripts/papers/qsparse_bits.py {name}.*"
        title = f"Bits to reach a target: {TITLES[name]}"
        section = f"qsparse-{name}"
        doc_sections.write(DOC, section, title, doc_sections.refreshed(DOC, section, parts, dated))


if __name__ == "__main__":
    typer.run(main)
