"""`make train` and `make train-tf`: runs a job on two Horovod ranks, compressed and dense, and compares both.

    make train                       # the digits job: a ResNet, SGD with momentum, compressed gradients
    make train ARGS="--job gpt"      # a small GPT, AdamW, compressed updates

The two runs follow each other, each with its own time. What compression costs the digits job in time is measured
afterwards, by steps of both jobs in one run, interleaved (step_times.py). Writes RUNS/<time>/results.json (all
figures), accuracy.png or loss.png (against bytes sent), config.yaml (the config that was used), and a folder for each
run.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, Literal

import matplotlib
import numpy as np
import typer
from history import mpirun, total
from rich.console import Console
from rich.table import Table
from step_times import Difference

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

Run = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """How a job is started and shown.

    Attributes:
        script: in scripts/train/, by framework: ``torch`` or ``tensorflow``.
        text: what it trains.
        config: what is compared with dense by default.
        length, default: the option for its length, and its default.
        measure: the key of its result in the metrics; ``shown``: its name; ``picture``: the file.
        form, difference: of the result, and of what both results differ by.
    """

    script: dict[str, str]
    text: str
    config: str
    length: str
    default: int
    measure: str
    shown: str
    picture: str
    form: Callable[[float], str]
    difference: Callable[[float, float], str]


JOBS = {
    "digits": Job(
        {"torch": "train_torch.py", "tensorflow": "train_tensorflow.py"},
        "a ResNet on 1,437 handwritten digits", "recommended", "--epochs", 20, "accuracy", "test accuracy",
        "accuracy.png", "{:.2%}".format, lambda a, b: f"{100 * (a - b):+.2f} points",
    ),
    "gpt": Job(
        {"torch": "train_gpt.py"}, "a GPT of 0.6 million parameters with AdamW on Python source",
        "adamw_small", "--steps", 2000, "validation", "validation loss, nats a character", "loss.png",
        "{:.4f}".format, lambda a, b: f"{a - b:+.4f} nats",
    ),
}  # fmt: skip
NAMES = {"torch": "PyTorch", "tensorflow": "Keras"}


def size(number: float) -> str:
    """A number of bytes in a readable unit."""
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.3g} {unit}" if unit != "B" else f"{number:.0f} B"
        number /= 1000
    return f"{number:.3g} GB"


def epochs_table(job: Job, run: Run, title: str) -> Table:
    """A table of one run, with one row per epoch, or tenth of the steps."""
    table = Table(title=title, title_justify="left")
    row = "epoch" if job.length == "--epochs" else "part"
    columns = (row, "loss", job.measure, "sent", "dense", "share", "encode s", "comm. s", "decode s", f"{row} s")
    for column in columns:
        table.add_column(column, justify="right")
    for row in run["epochs_done"]:
        table.add_row(
            str(row["epoch"]), f"{row['loss']:.4f}", job.form(row[job.measure]), size(row["bytes_sent"]),
            size(row["dense_bytes"]), f"{row['bytes_sent'] / row['dense_bytes']:.2%}", f"{row['encode_seconds']:.2f}",
            f"{row['wait_seconds']:.2f}", f"{row['decode_seconds']:.2f}", f"{row['seconds']:.1f}",
        )  # fmt: skip
    return table


def side_by_side(job: Job, compressed: list[Run], dense: list[Run], label: str) -> Table:
    """A table of both jobs; figures are means over the seeds."""
    seeds = f", mean of {len(dense)} seeds" if len(dense) > 1 else ""
    table = Table(title=f"The same job, compressed and dense{seeds}", title_justify="left")
    for column in ("", label, "dense", "compressed / dense"):
        table.add_column(column, justify="right" if column else "left")

    def line(name: str, value: Any, shown: Any, compare: Any = lambda a, b: "") -> None:
        ours, theirs = (mean(value(run["epochs_done"]) for run in runs) for runs in (compressed, dense))
        table.add_row(name, shown(ours), shown(theirs), compare(ours, theirs))

    def ratio(a: float, b: float) -> str:
        return f"{a / b:.2%}" if a < b / 10 else f"{a / b:.2f}x"

    line(f"final {job.shown}", lambda rows: rows[-1][job.measure], job.form, job.difference)
    line("bytes sent per rank", lambda rows: total(rows, "bytes_sent"), size, ratio)
    line("total seconds", lambda rows: total(rows, "seconds"), "{:.1f}".format)
    for name, key in (("encode", "encode"), ("communication", "wait"), ("decode", "decode")):
        line(f"  {name}", lambda rows, key=key: total(rows, f"{key}_seconds"), "{:.2f}".format)
    return table


def picture(job: Job, compressed: list[Run], dense: list[Run], label: str, path: Path) -> None:
    """Plots the result against the bytes that a rank has sent so far, with one line per run and a logarithmic axis."""
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for runs, name, colour in ((compressed, label, "tab:blue"), (dense, "dense", "tab:orange")):
        for number, run in enumerate(runs):
            so_far = np.cumsum([row["bytes_sent"] / 1e6 for row in run["epochs_done"]])
            percent = 100 if job.measure == "accuracy" else 1
            reached = [percent * row[job.measure] for row in run["epochs_done"]]
            axes.plot(so_far, reached, marker="o", markersize=3, color=colour, label=name if not number else None)
    axes.set(xscale="log", xlabel="megabytes sent per rank so far",
             ylabel=job.shown + ", %" * (job.measure == "accuracy"),
             title=f"{job.shown.split(',')[0].capitalize()} against bytes sent")  # fmt: skip
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main(
    name: Annotated[Literal["digits", "gpt"], typer.Option("--job", help="what to train")] = "digits",
    framework: Literal["torch", "tensorflow"] = "torch",
    config: Annotated[str, typer.Option(help="a preset or a YAML file, to compare with dense; default: by job")] = "",
    epochs: Annotated[int, typer.Option(min=1, help="of the digits job")] = JOBS["digits"].default,
    steps: Annotated[int, typer.Option(min=10, help="of the gpt job")] = JOBS["gpt"].default,
    seeds: Annotated[int, typer.Option(min=1, help="number of runs of each job")] = 1,
    ranks: Annotated[int, typer.Option(min=2)] = 2,
    pairs: Annotated[int, typer.Option(min=2, help="pairs of interleaved steps of the digits job to time")] = 100,
    runs: Annotated[Path, typer.Option(help="folder for the results")] = Path("runs"),
) -> None:
    """Trains with and without compression, prints the tables and writes the results."""
    job = JOBS[name]
    if framework not in job.script:
        raise typer.BadParameter(f"the job {name} is there in {', '.join(NAMES[one] for one in job.script)} only")
    config = config or job.config
    length = epochs if name == "digits" else steps
    console = Console(width=None if sys.stdout.isatty() else 110)
    out = runs / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    out.mkdir(parents=True)
    label = Path(config).stem
    console.print(
        f"Training {job.text} in {NAMES[framework]} on {ranks} Horovod ranks for {length} {job.length[2:]}: first with "
        f"{label}, then dense." + f" Then {pairs} steps of each are timed, interleaved." * (name == "digits")
    )
    environment = {"HVD_DEEPREDUCE_TERMINAL": str(int(console.is_terminal)), "PYTHONUNBUFFERED": "1"}

    def train(given: str, seed: int, folder: Path) -> Run:
        options = ("--config", given, "--seed", seed, job.length, length, "--out", folder)
        script = f"train/{job.script[framework]}"
        return mpirun(ranks, script, *options, out=folder / "metrics.json", environment=environment)

    trained = [
        (train(config, seed, out / f"{label}_{seed}"), train("none", seed, out / f"dense_{seed}"))
        for seed in range(seeds)
    ]
    compressed, dense = [both[0] for both in trained], [both[1] for both in trained]
    results: dict[str, Any] = {"compressed": compressed, "dense": dense}
    if name == "digits":
        times = out / "step_times.json"
        options = ("--framework", framework, "--config", config, "--pairs", pairs, "--out", times)
        results["steps"] = mpirun(ranks, "train/step_times.py", *options, out=times)
    console.print()
    console.print(epochs_table(job, compressed[0], f"{label}, rank 0"))
    waiting = "wait after the backward pass" if framework == "torch" else "not measured in TensorFlow"
    console.print(epochs_table(job, dense[0], f"dense, rank 0 (communication: {waiting})"))
    console.print(side_by_side(job, compressed, dense, label))
    if "steps" in results:
        console.print(Difference.of(results["steps"]).sentences(), soft_wrap=True)
    picture(job, compressed, dense, label, out / job.picture)
    (out / "results.json").write_text(json.dumps(results))
    (out / "config.yaml").write_bytes((out / f"{label}_0" / "config.yaml").read_bytes())
    console.print(f"\nAll figures: {out}/results.json   plot: {out}/{job.picture}   config: {out}/config.yaml")


if __name__ == "__main__":
    typer.run(main)
