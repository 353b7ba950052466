"""Bits until a target is reached: Qsparse-local-SGD, what it was compared with, and our codecs with outer momentum.

    python scripts/papers/qsparse_bits.py softmax --write
    python scripts/papers/qsparse_bits.py digits --write

All workers run in one process (scripts/train/local_updates.py). Bits are those that all workers together send to a
master, counted in two ways: as the paper counts (`paper_bits`), and those of the containers that were really made. Each
method runs with each step size of a grid, and its best one counts: the one that reaches the target with the fewest
bits, mean over the seeds. A target is reached at the first evaluation that meets it.
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
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
        rates: the first step sizes that are tried.
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
    problem: Problem, method: Method, setting: Setting, rate: float, seed: int, most: int | None = None
) -> list[Point]:
    """Trains until both targets are reached, or all steps are done, or ``most`` steps were not enough."""
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
            if min(point.loss for point in curve) <= setting.loss:
                if min(point.error for point in curve) <= setting.error:
                    break
            elif most is not None and step + 1 >= most:
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
    return Method(name, "topk_model", share, bits, every, outer_momentum=momentum, changes=changes, ours=True)


def levels(bits: int) -> dict[str, Any]:
    """QSGD with entropy-coded levels."""
    return {"name": "qsgd", "bits": bits, "entropy": "rans"}


@dataclass
class Result:
    """What a method needed, at its best step size: the curves of each seed."""

    method: Method
    rate: float
    curves: list[list[Point]]

    def needed(self, key: str, target: float, what: str) -> float | None:
        """The mean of a field of the points that meet the target; None if a seed does not reach it."""
        points = [reached(curve, key, target) for curve in self.curves]
        found = [getattr(point, what) for point in points if point is not None]
        return float(np.mean(found)) if len(found) == len(points) else None

    def bits(self, key: str, target: float, count: str = "sent_bits") -> float | None:
        """Mean bits until the target."""
        return self.needed(key, target, count)


def best(problem: Problem, method: Method, setting: Setting, seeds: int) -> Result:
    """Tries each step size with the first seed, and trains with the best one and the other seeds."""

    def lowest(curve: Sequence[Point]) -> float:
        return min((one.loss for one in curve), default=math.inf)

    rate, curve, least = setting.rates[0], [], None
    for tried in setting.rates:
        found = train(problem, method, setting, tried, 0, least)
        point = reached(found, "loss", setting.loss)
        if point is not None and (least is None or point.step < least):
            rate, curve, least = tried, found, point.step
        elif least is None and lowest(found) < lowest(curve):
            rate, curve = tried, found
    curves = [curve, *(train(problem, method, setting, rate, seed) for seed in range(1, seeds))]
    result = Result(method, rate, curves)
    steps = result.needed("loss", setting.loss, "step")
    print(f"{method.name}, H {method.every}: step size {rate:g}, {steps} steps", flush=True)
    return result


def short(number: float) -> str:
    """Three digits, or all of a large number's."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def table(results: Sequence[Result], setting: Setting) -> str:
    """Markdown: bits in both counts, and how many times fewer they are than those of SGD and Top_k with H = 1."""
    first = {result.method.name: result for result in reversed(results) if result.method.every == 1}
    head = [
        "method", "H", "rate", f"steps to loss {setting.loss:g}", "as the paper counts", "really sent", "SGD / this",
        "Top_k / this", f"really sent until test error {setting.error:g}", "SGD / this", "Top_k / this",
    ]  # fmt: skip
    lines = []

    def number(value: float | None) -> str:
        return "not reached" if value is None else f"{short(value / 1e6)} Mbit"

    def times(value: float | None, other: str, key: str, target: float) -> str:
        base = first[other].bits(key, target)
        return "" if value is None or base is None else f"{short(base / value)}x"

    for result in results:
        steps = result.needed("loss", setting.loss, "step")
        loss, error = result.bits("loss", setting.loss), result.bits("error", setting.error)
        lines.append([
            f"**{result.method.name}**" if result.method.ours else result.method.name,
            f"1 to {result.method.every}" if result.method.asynchronous else result.method.every, f"{result.rate:g}",
            "" if steps is None else f"{steps:.0f}", number(result.bits("loss", setting.loss, "paper_bits")),
            number(loss), *(times(loss, other, "loss", setting.loss) for other in ("SGD", "Top_k")),
            number(error), *(times(error, other, "error", setting.error) for other in ("SGD", "Top_k")),
        ])  # fmt: skip
    return doc_sections.table(head, lines, right=True)


def draw(results: Sequence[Result], setting: Setting, path: Path) -> None:
    """Objective and test error against bits, mean of the seeds, logarithmic bits."""
    shown = [result for result in results if result.method.every in (1, 8) or result.method.ours]
    figure, both = figure_kit.picture(2, width=14, height=4.6)

    def name(method: Method) -> tuple[Any, ...]:
        """Results that have one colour."""
        return method.name, method.ours and method.every

    names = list(dict.fromkeys(name(one.method) for one in shown))
    colors = [color for half in (0, 1) for color in matplotlib.colormaps["tab20"].colors[half::2]]
    for axes, key, target in zip(both, ("loss", "error"), (setting.loss, setting.error), strict=True):
        for method, curves in ((one.method, one.curves) for one in shown):
            points = min(map(len, curves))
            if points:
                mean = Point(*np.array([curve[:points] for curve in curves]).mean(0).T)
                axes.plot(
                    mean.sent_bits, getattr(mean, key), color=colors[names.index(name(method))],
                    lw=2 if method.ours else 1.2, ls="-" if method.every == 1 or method.ours else "--",
                    label=f"{method.name}, H = {method.every}",
                )  # fmt: skip
        axes.axhline(target, color="grey", lw=0.8)
        axes.set(xscale="log", xlabel="bits that all workers have sent, in containers")
    both[0].set(ylabel="training objective", ylim=(0.6 * setting.loss, 10 * setting.loss))
    both[1].set(ylabel="test error", ylim=(0, 5 * setting.error))
    figure.legend(*both[1].get_legend_handles_labels(), fontsize=8, frameon=False, loc="outside right center")
    figure_kit.save(figure, path)


SETTINGS = {
    "softmax": Setting(15, 2000, 8, (0.6, 1.2, 2.4, 0.3), 1000, 0.11, 0.25),
    "digits": Setting(4, 320, 8, (0.1,), 500, 0.03, 0.05),
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
        setting = Setting(setting.workers, 24, 8, setting.rates[:1], setting.a, 0.9, 2.3)
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
    results = [best(problem, method, setting, seeds) for method in track(methods, experiment)]
    out.mkdir(parents=True, exist_ok=True)
    rows = [{"method": asdict(one.method), "rate": one.rate, "curves": one.curves} for one in results]
    (out / f"{experiment}.json").write_text(json.dumps(rows))
    report(experiment, results, setting, out, write)


def report(name: str, results: Sequence[Result], setting: Setting, out: Path, write: bool) -> None:
    """Prints the table and draws the picture; or writes the section of docs/results/schemes.md as well."""
    text = table(results, setting)
    draw(results, setting, (DOC.parent / "figures" if write else out) / f"qsparse_{name}.png")
    print(text)
    if write:
        parts = [text, f"![bits against objective and test error](figures/qsparse_{name}.png)"]
        dated = f"*{date.today()}, scripts/papers/qsparse_bits.py {name}.*"
        title = "Bits to reach a target: " + {"softmax": "softmax regression", "digits": "the digits ResNet"}[name]
        section = f"qsparse-{name}"
        doc_sections.write(DOC, section, title, doc_sections.refreshed(DOC, section, parts, dated))


if __name__ == "__main__":
    typer.run(main)
