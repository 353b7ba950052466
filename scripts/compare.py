"""`make train` and `make train-tf`: runs the digits job on two Horovod ranks, compressed and dense, and compares both.

The two jobs run one after the other, each with its own time; what compression costs in time is measured afterwards, by
steps of both jobs in one run, interleaved (step_times.py). Writes RUNS/<time>/results.json (all figures), accuracy.png
(accuracy against bytes sent), config.yaml (the config that was used), and a folder for each run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import datetime
from enum import Enum
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import matplotlib
import typer
from rich.console import Console
from rich.table import Table
from step_times import Difference

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

ROOT = Path(__file__).parent.parent
Run = dict[str, Any]


class Framework(str, Enum):
    """The framework of the training script."""

    torch = "torch"
    tensorflow = "tensorflow"


NAMES = {Framework.torch: "PyTorch", Framework.tensorflow: "Keras"}


def train(framework: Framework, config: str, seed: int, out: Path, ranks: int, epochs: int, terminal: bool) -> Run:
    """Runs one job under mpirun and returns its metrics."""
    command = ["mpirun", "-np", str(ranks), sys.executable, str(ROOT / "scripts" / f"train_{framework.value}.py")]
    command += ["--config", config, "--seed", str(seed), "--epochs", str(epochs), "--out", str(out)]
    environment = {**os.environ, "HVD_DEEPREDUCE_TERMINAL": str(int(terminal)), "PYTHONUNBUFFERED": "1"}
    if subprocess.run(command, env=environment).returncode:
        raise SystemExit(f"the training job failed; its output is above. The command was: {' '.join(command)}")
    run: Run = json.loads((out / "metrics.json").read_text())
    return run


def time_steps(framework: Framework, config: str, ranks: int, pairs: int, out: Path) -> dict[str, Any]:
    """Times steps of both jobs, interleaved, under mpirun; returns what step_times.py wrote."""
    command = ["mpirun", "-np", str(ranks), sys.executable, str(ROOT / "scripts" / "step_times.py")]
    command += ["--framework", framework.value, "--config", config, "--pairs", str(pairs), "--out", str(out)]
    if subprocess.run(command).returncode:
        raise SystemExit(f"timing the steps failed; the output is above. The command was: {' '.join(command)}")
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def total(run: Run, key: str) -> float:
    """The sum of a metric over the epochs."""
    return float(sum(row[key] for row in run["epochs_done"]))


def size(number: float) -> str:
    """A number of bytes in a readable unit."""
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.3g} {unit}" if unit != "B" else f"{number:.0f} B"
        number /= 1000
    return f"{number:.3g} GB"


def epochs_table(run: Run, title: str) -> Table:
    """A table of one run, with one row per epoch."""
    table = Table(title=title, title_justify="left")
    for column in ("epoch", "loss", "accuracy", "sent", "dense", "share", "encode s", "comm. s", "decode s", "epoch s"):
        table.add_column(column, justify="right")
    for row in run["epochs_done"]:
        table.add_row(
            str(row["epoch"]), f"{row['loss']:.4f}", f"{row['accuracy']:.2%}", size(row["bytes_sent"]),
            size(row["dense_bytes"]), f"{row['bytes_sent'] / row['dense_bytes']:.2%}", f"{row['encode_seconds']:.2f}",
            f"{row['wait_seconds']:.2f}", f"{row['decode_seconds']:.2f}", f"{row['seconds']:.1f}",
        )  # fmt: skip
    return table


def side_by_side(compressed: list[Run], dense: list[Run], label: str) -> Table:
    """A table of both jobs; figures are means over the seeds."""
    seeds = f", mean of {len(dense)} seeds" if len(dense) > 1 else ""
    table = Table(title=f"The same job, compressed and dense{seeds}", title_justify="left")
    for column in ("", label, "dense", "compressed / dense"):
        table.add_column(column, justify="right" if column else "left")

    def line(name: str, value: Any, shown: Any, compare: Any) -> None:
        ours, theirs = (mean(value(run) for run in runs) for runs in (compressed, dense))
        table.add_row(name, shown(ours), shown(theirs), compare(ours, theirs))

    def ratio(a: float, b: float) -> str:
        return f"{a / b:.2%}" if a < b / 10 else f"{a / b:.2f}x"

    line("final accuracy", lambda r: r["epochs_done"][-1]["accuracy"], "{:.2%}".format,
         lambda a, b: f"{100 * (a - b):+.2f} points")  # fmt: skip
    line("bytes sent per rank", lambda r: total(r, "bytes_sent"), size, ratio)
    line("total seconds", lambda r: total(r, "seconds"), "{:.1f}".format, lambda a, b: "")
    line("  encode", lambda r: total(r, "encode_seconds"), "{:.2f}".format, lambda a, b: "")
    line("  communication", lambda r: total(r, "wait_seconds"), "{:.2f}".format, lambda a, b: "")
    line("  decode", lambda r: total(r, "decode_seconds"), "{:.2f}".format, lambda a, b: "")
    return table


def picture(compressed: list[Run], dense: list[Run], label: str, path: Path) -> None:
    """Plots accuracy against the bytes that a rank has sent so far, with one line per run and a logarithmic axis."""
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for runs, name, colour in ((compressed, label, "tab:blue"), (dense, "dense", "tab:orange")):
        for number, run in enumerate(runs):
            sent, so_far = 0.0, []
            for row in run["epochs_done"]:
                sent += row["bytes_sent"]
                so_far.append(sent / 1e6)
            accuracy = [100 * row["accuracy"] for row in run["epochs_done"]]
            axes.plot(so_far, accuracy, marker="o", markersize=3, color=colour, label=name if not number else None)
    axes.set_xscale("log")
    axes.set_xlabel("megabytes sent per rank so far")
    axes.set_ylabel("test accuracy, %")
    axes.set_title("Accuracy against bytes sent (one point per epoch)")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main(
    framework: Framework = Framework.torch,
    config: Annotated[str, typer.Option(help="a preset or a YAML file, to compare with dense")] = "topk_rice_qsgd",
    epochs: Annotated[int, typer.Option(min=1)] = 20,
    seeds: Annotated[int, typer.Option(min=1, help="number of runs of each job")] = 1,
    ranks: Annotated[int, typer.Option(min=2)] = 2,
    pairs: Annotated[int, typer.Option(min=2, help="pairs of interleaved steps that are timed")] = 100,
    runs: Annotated[Path, typer.Option(help="folder for the results")] = Path("runs"),
) -> None:
    """Trains with and without compression, prints the tables and writes the results."""
    console = Console(width=None if sys.stdout.isatty() else 110)
    out = runs / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    out.mkdir(parents=True)
    label = Path(config).stem
    console.print(
        f"Training a ResNet on 1,437 handwritten digits in {NAMES[framework]} on {ranks} Horovod ranks for {epochs} "
        f"epochs: first with {label}, then dense. Then {pairs} steps of each are timed, interleaved."
    )
    terminal = console.is_terminal
    trained = [
        (train(framework, config, seed, out / f"{label}_{seed}", ranks, epochs, terminal),
         train(framework, "none", seed, out / f"dense_{seed}", ranks, epochs, terminal))
        for seed in range(seeds)
    ]  # fmt: skip
    compressed, dense = [both[0] for both in trained], [both[1] for both in trained]
    steps = time_steps(framework, config, ranks, pairs, out / "step_times.json")
    console.print()
    console.print(epochs_table(compressed[0], f"{label}, rank 0"))
    waiting = "wait after the backward pass" if framework == Framework.torch else "not measured in TensorFlow"
    console.print(epochs_table(dense[0], f"dense, rank 0 (communication: {waiting})"))
    console.print(side_by_side(compressed, dense, label))
    console.print(Difference.of(steps).sentences(), soft_wrap=True)
    picture(compressed, dense, label, out / "accuracy.png")
    (out / "results.json").write_text(json.dumps({"compressed": compressed, "dense": dense, "steps": steps}))
    (out / "config.yaml").write_bytes((out / f"{label}_0" / "config.yaml").read_bytes())
    console.print(f"\nAll figures: {out}/results.json   plot: {out}/accuracy.png   config: {out}/config.yaml")


if __name__ == "__main__":
    typer.run(main)
