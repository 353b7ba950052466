"""What the figures share: what a figure is, the JSON behind it, and the style of the pictures."""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "dev"))

import doc_sections
import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402
from matplotlib.figure import Figure as Picture  # noqa: E402

ROOT, RESULTS = doc_sections.ROOT, doc_sections.RESULTS
FOLDER = RESULTS / "figures"
Data = dict[str, Any]
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31", "#999999", "#F0E442")
"""Okabe and Ito's, which readers with any colour vision can tell apart; brown and grey are added."""
MARKERS = "os^DvPX*<>"
processes = 2
"""Trainings at a time, each on one thread."""
STYLE = {
    "font.size": 10, "axes.titlesize": 11, "axes.labelsize": 10, "legend.fontsize": 9, "xtick.labelsize": 9,
    "ytick.labelsize": 9, "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True, "axes.spines.top": False,
    "axes.spines.right": False, "lines.linewidth": 1.6, "lines.markersize": 6, "figure.constrained_layout.use": True,
    "savefig.dpi": 130, "axes.prop_cycle": pyplot.cycler(color=COLORS),
}  # fmt: skip


def picture(columns: int = 1, rows: int = 1, width: float = 10, height: float = 4, **more: Any) -> tuple[Picture, Any]:
    """An empty picture in the common style, and its axes, as ``pyplot.subplots``."""
    with matplotlib.rc_context(STYLE):
        return pyplot.subplots(rows, columns, figsize=(width, height), **more)


def plain(columns: int = 1, **more: Any) -> tuple[Picture, Any]:
    """As ``picture``, in matplotlib's own style."""
    return pyplot.subplots(1, columns, **more)


def curves(axes: Any, series: Iterable[tuple[str, Any, Any]], **style: Any) -> None:
    """Plots names, abscissas and ordinates, each with its colour and marker."""
    for number, (name, x, y) in enumerate(series):
        label = name.replace("*", "").replace("`", "")
        axes.plot(x, y, label=label, color=COLORS[number], marker=MARKERS[number], **style)


def trainings(
    train: Callable[..., Data], methods: Mapping[str, Sequence[Any]], seeds: int = 1, first: int = 0
) -> Data:
    """The runs of each method, some at a time.

    Args:
        train: gets the arguments of a method and a seed; processes find it by its name.
        seeds: their number.
        first: the first of them.
    """
    chosen = range(first, first + seeds)
    with ProcessPoolExecutor(processes) as pool:
        runs = {name: [pool.submit(train, *given, seed) for seed in chosen] for name, given in methods.items()}
        return {name: [one.result() for one in own] for name, own in runs.items()}


def legend_below(figure: Picture, axes: Any, columns: int) -> None:
    """One legend under all axes, so that it hides no point."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=9, frameon=False)


def save(figure: Picture, path: Path, **more: Any) -> None:
    """Writes a picture, and frees it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, **more)
    pyplot.close(figure)


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table whose columns but the first are aligned to the right."""
    return doc_sections.table(head, rows, right=True)


class Files:
    """The files of a figure in docs/results/figures/: what was computed, or the tables of its page; and its picture."""

    name: str

    @property
    def json(self) -> Path:
        return FOLDER / f"{self.name}.json"

    @property
    def png(self) -> Path:
        return FOLDER / f"{self.name}.png"


@dataclass(frozen=True)
class Figure(Files):
    """A figure that scripts/papers/figures.py computes and draws.

    What its input, its baseline and its size are, what the papers say, and what it is not, stands in its section.

    Attributes:
        name: of its JSON and PNG files.
        title: of its section.
        papers: the figures and tables of the papers that it repeats, as in ``DeepReduce Figure 6``.
        compute: returns what is drawn. True: a tiny input, in seconds, for the tests.
        draw: makes the picture.
        table: makes the table below it, with the values that the paper prints.
        minutes: on two quiet cores.
        timed: it has times, so it needs a quiet machine.
    """

    name: str
    title: str
    papers: tuple[str, ...]
    compute: Callable[[bool], Data]
    draw: Callable[[Data], Picture]
    table: Callable[[Data], str]
    minutes: float
    timed: bool = False

    def make(self, tiny: bool = False) -> Data:
        """Computes the figure: the content of its JSON file."""
        began, load = time.time(), os.getloadavg()[0]
        data = self.compute(tiny)
        return {
            "figure": self.name, "papers": list(self.papers), "date": str(date.today()),
            "machine": {**machine(), "load_before": round(load, 1)}, "seconds": round(time.time() - began),
            "data": data,
        }  # fmt: skip

    def save(self, made: Data) -> None:
        """Writes the picture of what was made."""
        with matplotlib.rc_context(STYLE):
            drawn = self.draw(made["data"])
        save(drawn, self.png)

    def section(self, made: Data) -> str:
        """The section of docs/results/figures.md."""
        busy = f", load {made['machine']['load_before']} before" if self.timed else ""
        parts = [f"![{self.title}](figures/{self.png.name})", *self.table(made["data"]).split("\n\n")]
        return doc_sections.refreshed(RESULTS / "figures.md", self.name, parts, (
            f"*{made['date']}, {made['machine']['cores']} cores, {made['machine']['cpu']}{busy}; `make figures "
            f"ARGS={self.name}`, [figures/{self.json.name}](figures/{self.json.name}).*"
        ))  # fmt: skip


def machine() -> dict[str, Any]:
    """The processor's model and the number of cores that this process may use."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {"cpu": models[0] if models else os.uname().machine, "cores": len(os.sched_getaffinity(0))}


def best_inside(grid: Sequence[float], loss: Callable[[float], float], name: str, ratio: float | None = None) -> float:
    """The value of a sorted grid with the least loss.

    Args:
        name: of the value, for the error.
        ratio: of the grid's values. While the least loss is at an end, the grid grows there, by four values at most.

    Raises:
        RuntimeError: the value is at an end of the grid, so that there may be a better one beyond.
    """
    losses = {value: loss(value) for value in grid}
    while True:
        best = min(losses, key=lambda value: losses[value])
        if min(losses) < best < max(losses):
            return best
        if ratio is None or len(losses) == len(grid) + 4:
            raise RuntimeError(f"{name} {best:g} is best, at the end of the grid: make it wider")
        beyond = best / ratio if best == min(losses) else best * ratio
        losses[beyond] = loss(beyond)


def depth(kept: Sequence[float]) -> float:
    """The mean layer, 0 the first and 1 the last, each counted as much as the share of its weights that is sent."""
    return sum(at * one for at, one in enumerate(kept)) / (len(kept) - 1) / sum(kept)


def json_lines(path: Path) -> list[Data]:
    """The dicts of a file of JSON lines; none if it is not there."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def dump(path: Path, made: Data) -> None:
    """Writes JSON with five digits for each number, which is what a figure can show."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(rounded(made), indent=1)
    # Lists of numbers on one line.
    path.write_text(re.sub(r"\[[^\[\]{}]*\]", lambda found: " ".join(found[0].split()), text) + "\n")


def rounded(value: Any) -> Any:
    """Floats with five significant digits, in dicts and lists too."""
    if isinstance(value, dict):
        return {str(key): rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(one) for one in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
