"""Which presets stay within half a point of dense's accuracy at 0.25% of its bytes: two jobs.

    python scripts/papers/half_a_point.py --write           # trains what is missing, and writes the table
    python scripts/papers/half_a_point.py --job ncf --seeds 1

A convolutional network and an embedding model, on two ranks. The first is a job of Horovod; the ranks of the second are
simulated (simulated_ranks.py). A run is a line of docs/results/figures/half_a_point.jsonl. Runs that are there already
are not repeated: to train one again, take its line out.
"""

import json
import sys
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from statistics import mean
from typing import Annotated, NamedTuple

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("dev", "train"))

import doc_sections
import figures_ncf
import ncf
import torch
import typer
from figure_kit import FOLDER, RESULTS, ROOT, json_lines, table
from history import mpirun, total
from local_updates import LocalUpdates, Outer
from simulated_ranks import SimulatedRanks
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from hvd_deepreduce import Config
from hvd_deepreduce.exchange import traffic

DOC = RESULTS / "presets.md"
RUNS = FOLDER / "half_a_point.jsonl"
RANKS, USERS, EPOCHS = 2, 600, 6
POINTS, SHARE = 0.5, 0.0025
"""The aim: at most so many points less than dense, at this share of its bytes."""


PRESETS = {"digits": "small", "ncf": "adamw_small"}
"""The jobs, which the page explains, and the preset that is compared with dense."""


class Run(NamedTuple):
    """A training: its result, from 0 to 1, and the bytes sent by a rank, relative to dense."""

    job: str
    preset: str
    seed: int
    result: float
    share: float


def digits(preset: str, seed: int, folder: Path) -> Run:
    """Trains under mpirun."""
    out = folder / f"digits_{preset}_{seed}"
    options = ("--width", 32, "--epochs", 12, "--config", preset, "--seed", seed, "--out", out)
    rows = mpirun(RANKS, "train/train_torch.py", *options, out=out / "metrics.json")["epochs_done"]
    share = total(rows, "bytes_sent") / total(rows, "dense_bytes")
    return Run("digits", preset, seed, rows[-1]["accuracy"], share)


def neumf(preset: str, seed: int, users: int = USERS, epochs: int = EPOCHS) -> Run:
    """Trains with dense gradients (``none``), or with a preset's local updates, each rank with its own Adam."""
    job = figures_ncf.Job(seed, users)
    start = parameters_to_vector(job.parameters).detach()
    models, updates, every = torch.nn.Parameter(start[None].clone()), None, 1
    if preset != "none":
        config = Config.load(preset)
        if config.local is None:
            raise ValueError(f"preset is {preset!r}; only none and presets with local updates run here")
        ranks, every = SimulatedRanks(config, RANKS, job.sizes), config.local.every
        outer = Outer(config.local.lr, config.local.momentum)
        updates = LocalUpdates(ranks, start.numpy(), config.local.decay, outer)
        models = torch.nn.Parameter(torch.from_numpy(updates.local))
    optimizer = torch.optim.Adam([models], figures_ncf.RATE)
    rates, steps = [], 0
    for epoch in range(epochs):
        feeds = [job.ratings.batches(users, rank, RANKS, (seed, epoch)) for rank in range(RANKS)]
        for batches in zip(*feeds, strict=True):
            gradients = []
            for rank, batch in enumerate(batches):
                vector_to_parameters(models.detach()[rank if updates else 0], job.parameters)
                gradients.append(torch.from_numpy(job.mean_gradient([batch])))
            models.grad = torch.stack(gradients) if updates else torch.stack(gradients).mean(0, keepdim=True)
            optimizer.step()
            steps += 1
            if updates and steps % every == 0:
                updates.synchronise()
        if updates:
            updates.synchronise()
        vector_to_parameters(models.detach()[0], job.parameters)
        rates.append(ncf.hit_rate(job, job.ratings, 0, 1))
    dense = traffic.allreduce(4 * start.numel(), RANKS).sent * steps
    return Run("ncf", preset, seed, max(rates), max(updates.job.sent) / dense if updates else 1.0)


def load(path: Path) -> list[Run]:
    """The runs of a file."""
    return [Run(**run) for run in json_lines(path)]


def rows(runs: Iterable[Run]) -> list[list[str]]:
    """Of each job and preset: the cells of the table, with the points by which dense of the same seed is better."""
    by_method: dict[tuple[str, str], dict[int, Run]] = {}
    for run in runs:
        by_method.setdefault((run.job, run.preset), {})[run.seed] = run
    found = []
    for name, preset in PRESETS.items():
        dense = by_method.get((name, "none"), {})
        pairs = [(run, dense[seed]) for seed, run in by_method.get((name, preset), {}).items() if seed in dense]
        if not pairs:
            continue
        points = [100 * (other.result - run.result) for run, other in pairs]
        share = mean(run.share for run, _ in pairs)
        found.append([
            name, f"`{preset}`", f"{share:.3%}", f"{mean(run.result for run, _ in pairs):.2%}",
            f"{mean(other.result for _, other in pairs):.2%}",
            f"{mean(points):+.2f}" + f" ({min(points):+.2f} to {max(points):+.2f})" * (len(points) > 1),
            str(len(pairs)), "yes" if mean(points) <= POINTS and share <= SHARE else "**no**",
        ])  # fmt: skip
    return found


HEADS = ("job", "preset", "bytes / dense", "result", "dense's", "points worse", "seeds", "reached")


def main(
    seeds: Annotated[int, typer.Option(min=1, help="runs of each preset")] = 3,
    jobs: Annotated[list[str] | None, typer.Option("--job", help="digits or ncf; default: both")] = None,
    runs: Annotated[Path, typer.Option(help="file of the runs, which is continued")] = RUNS,
    folder: Annotated[Path, typer.Option(help="folder for what digits writes")] = ROOT / "runs" / "half_a_point",
    draw: Annotated[bool, typer.Option(help="train nothing: only the runs that the files have")] = False,
    write: Annotated[bool, typer.Option(help="write the section of docs/results/presets.md")] = False,
) -> None:
    """Trains each job dense and with its preset, and prints the table."""
    jobs = jobs or list(PRESETS)
    if unknown := set(jobs) - set(PRESETS):
        raise typer.BadParameter(f"no job is named {', '.join(unknown)}; the jobs are: {', '.join(PRESETS)}")
    there = {(run.job, run.preset, run.seed) for run in load(runs)}
    wanted = [(job, preset, seed) for job in jobs for seed in range(seeds) for preset in ("none", PRESETS[job])]
    for job, preset, seed in [] if draw else wanted:
        if (job, preset, seed) not in there:
            made = digits(preset, seed, folder) if job == "digits" else neumf(preset, seed)
            print(made, flush=True)
            with runs.open("a") as file:
                file.write(json.dumps(made._asdict()) + "\n")
    found = table(HEADS, rows(load(runs)))
    print(found)
    if write:
        dated = f"*{date.today()}, scripts/papers/half_a_point.py.*"
        body, title = doc_sections.refreshed(DOC, "half-a-point", [found], dated), "Half a point of accuracy at"
        doc_sections.write(DOC, "half-a-point", f"{title} {SHARE:.2%} of the bytes", body)


if __name__ == "__main__":
    typer.run(main)
