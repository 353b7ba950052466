"""Loss against bytes of several methods: the runs that are missing, the rows of a table, the table, the picture.

A run is a dict with ``name`` (of its method), ``workers``, ``steps``, ``seed``, ``rate`` (the largest learning rate),
``settings`` (of its method), ``loss`` and ``share``: bytes, relative to dense.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import figure_kit
import matplotlib

Run = dict[str, Any]
MARKERS = {2: "o", 4: "s"}


def signs(density: float) -> dict[str, Any]:
    """The config that sends the signs of the largest elements of the whole model, and their mean magnitude."""
    return {"sparsifier": {"name": "topk", "density": density}, "index": "auto", "value": "sign", "scope": "model"}


def load(path: Path, methods: Mapping[str, Any]) -> list[Run]:
    """The runs of a file that have the settings and learning rates of today.

    Args:
        methods: by name; dataclasses with ``rate(workers)``.
    """
    lines = path.read_text().splitlines() if path.exists() else []
    runs: list[Run] = [json.loads(line) for line in lines]
    today = {name: json.loads(json.dumps(asdict(method))) for name, method in methods.items()}
    return [
        run
        for run in runs
        if today.get(run["name"]) == run["settings"] and run["rate"] == methods[run["name"]].rate(run["workers"])
    ]


def run_missing(
    train: Callable[[str, int, int, int], Run],
    methods: Mapping[str, Any],
    wanted: Iterable[tuple[str, int, int, int]],
    path: Path,
    processes: int,
) -> list[Run]:
    """Runs what is not in the file yet, and writes it there; returns all runs, as ``load``.

    Args:
        train: makes a run from a method's name, the number of workers, steps, and the seed.
        wanted: arguments of ``train``.
        processes: runs at a time.
    """
    there = {(run["name"], run["workers"], run["steps"], run["seed"]) for run in load(path, methods)}
    missing = [one for one in wanted if one not in there]
    path.parent.mkdir(exist_ok=True)
    with ProcessPoolExecutor(processes) as pool, path.open("a") as file:
        for run in pool.map(train, *zip(*missing, strict=True)) if missing else ():
            file.write(json.dumps(run) + "\n")
            file.flush()
            print(f"{run['name']}, {run['workers']} workers, seed {run['seed']}: {run['loss']:.4f} nats", flush=True)
    return load(path, methods)


def rows(runs: Iterable[Run], words: Mapping[str, str], steps: int) -> list[Run]:
    """A row for each method and number of workers: means over the seeds, and the gap to dense at equal seeds.

    Args:
        runs: of any number of steps.
        words: of each method, by name, in the order of the rows.
        steps: of the runs that count.
    """
    by_job: dict[tuple[int, str], dict[int, Run]] = {}
    for run in runs:
        if run["steps"] == steps:
            by_job.setdefault((run["workers"], run["name"]), {})[run["seed"]] = run
    found = []
    order = list(words)
    for (workers, name), seeds in sorted(by_job.items(), key=lambda item: (item[0][0], order.index(item[0][1]))):
        dense = by_job.get((workers, "dense"), {})
        gaps = [run["loss"] - dense[seed]["loss"] for seed, run in seeds.items() if seed in dense]
        mine = list(seeds.values())
        found.append({
            "name": name, "workers": workers, "seeds": len(mine), "share": mean(run["share"] for run in mine),
            "loss": mean(run["loss"] for run in mine), "gap": mean(gaps) if gaps else None,
            "least": min(gaps, default=None), "most": max(gaps, default=None),
        })  # fmt: skip
    return found


def table(found: Iterable[Run], words: Mapping[str, str]) -> str:
    """The rows as a Markdown table."""
    lines = ["| workers | what is sent | bytes / dense | loss | gap | seeds |", "| --- | --- | --- | --- | --- | --- |"]
    for row in found:
        gap = "" if row["gap"] is None else f"{row['gap']:+.3f}"
        if row["seeds"] > 1 and row["gap"]:
            gap += f" ({row['least']:+.3f} to {row['most']:+.3f})"
        share = f"{row['share']:.2%}" if row["share"] > 0.01 else f"{row['share']:.3%}"
        cells = [row["workers"], words[row["name"]], share, f"{row['loss']:.4f}", gap, row["seeds"]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def picture(found: Iterable[Run], words: Mapping[str, str], aim: float, title: str, path: Path) -> None:
    """Plots the gap to dense against the share of bytes, one point for each row.

    Args:
        found: the rows.
        words: of each method, for the legend.
        aim: a gap, drawn as a line.
        title: above the picture.
        path: of the PNG file.
    """
    shown = [row for row in found if row["gap"] is not None]
    names = [name for name in words if any(row["name"] == name for row in shown)]
    colors = matplotlib.colormaps["tab20"].colors
    figure, axes = figure_kit.picture(width=11.5, height=4.8)
    for row in shown:
        color = colors[names.index(row["name"]) % len(colors)]
        axes.plot(100 * row["share"], row["gap"], MARKERS.get(row["workers"], "^"), color=color, markersize=8)
    for number, name in enumerate(names):
        label = words[name].replace("*", "").replace("`", "")
        axes.plot([], [], "o", color=colors[number % len(colors)], label=label)
    for workers in sorted({row["workers"] for row in shown}):
        axes.plot([], [], MARKERS.get(workers, "^"), color="grey", label=f"{workers} workers")
    axes.axhline(aim, ls="--", color="grey", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("bytes that a worker sends, % of a dense float32 ring allreduce in every step")
    axes.set_ylabel("validation loss above dense, nats")
    axes.set_yscale("symlog", linthresh=0.1)  # linear up to 0.1
    axes.set_yticks([-0.03, 0, 0.03, 0.06, 0.1, 0.3, 1], ["-0.03", "0", "0.03", "0.06", "0.1", "0.3", "1"])
    axes.set_ylim(-0.06, 1.2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_title(title)
    figure.legend(fontsize=8, frameon=False, loc="outside right center")
    figure_kit.save(figure, path)
