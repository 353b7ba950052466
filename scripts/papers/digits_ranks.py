#!/usr/bin/env python3
"""Accuracy and bytes of the digits job on many ranks, which one process simulates, under several exchanges.

    scripts/papers/digits_ranks.py --write                 # as in docs/exchanges.md

The job is that of scripts/train/train_torch.py: a ResNet of 0.7 million parameters on scikit-learn's 1,797 handwritten
digits, SGD with momentum. One model computes all ranks' gradients (scripts/train/simulated_training.py); containers,
residuals and sums are the package's own (scripts/train/simulated_ranks.py). There are no times.
"""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("dev", "train"))

import doc_sections
import numpy as np
import simulated_training
import torch
import typer
from simulated_ranks import DenseRanks, SimulatedRanks
from simulated_training import Network
from train_torch import ResNet, digits

from hvd_deepreduce import Config
from hvd_deepreduce.exchange import traffic

DOC = doc_sections.ROOT / "docs" / "exchanges.md"
METHODS: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "allgather": {"exchange": "allgather"},
    "reduce_scatter": {"exchange": "reduce_scatter"},
    "reduce_scatter, density 0.01": {"exchange": {"name": "reduce_scatter", "density": 0.01}},
    "densestream, density 0.01": {"exchange": {"name": "densestream", "density": 0.01}},
    "densestream, density 0.01, qsgd": {"exchange": {"name": "densestream", "density": 0.01, "value": "qsgd"}},
}


def train(settings: dict[str, Any] | None, ranks: int, epochs: int, batch: int, lr: float, seed: int) -> dict[str, Any]:
    """One training: test accuracy, loss, and bytes of the busiest rank relative to a dense ring."""
    torch.manual_seed(seed)
    data, network = digits(), Network(ResNet())
    job: Any = DenseRanks(ranks)
    if settings is not None:
        job = SimulatedRanks(Config.load("fast", seed=seed, **settings), ranks, network.sizes)
    optimizer = torch.optim.SGD(network.parameters, lr=lr, momentum=0.9, weight_decay=5e-4)
    steps = len(data[0]) // ranks // batch * epochs
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.2)
    *_, (accuracy, losses) = simulated_training.epochs(network, job, optimizer, schedule, data, epochs, batch, seed)
    dense = steps * traffic.allreduce(4 * sum(network.sizes), ranks).received
    received = dense if settings is None else max(job.received)
    return {"accuracy": accuracy, "loss": float(np.mean(losses)), "received": received / dense, "steps": steps}


def text(rows: list[dict[str, Any]], ranks: int, epochs: int, batch: int) -> str:
    """The section of docs/exchanges.md."""
    lines = []
    for name in METHODS:
        own = [row for row in rows if row["method"] == name]
        if own:
            each = ", ".join(f"{row['accuracy']:.2%}" for row in own)
            accuracy, loss, received = (np.mean([row[key] for row in own]) for key in ("accuracy", "loss", "received"))
            lines.append([name, f"{accuracy:.2%} ({each})", f"{loss:.4f}", f"{received:.2%}"])
    head = ["exchange", "test accuracy, mean (each seed)", "loss", "busiest rank receives, of a dense ring's"]
    return f"""\
`scripts/papers/digits_ranks.py --write`: the digits job ({rows[0]["steps"]} steps in {epochs} epochs, {batch} images a
rank and step) with the codecs of `fast` at 1%, on {ranks} simulated ranks. Containers, residuals and sums are the
package's own. The baseline is the dense mean. The test set has 360 images, so one image is 0.28%.

{doc_sections.table(head, lines)}"""


def main(
    methods: Annotated[str, typer.Option(help=f"semicolon-separated: {'; '.join(METHODS)}")] = ";".join(METHODS),
    ranks: Annotated[int, typer.Option(min=1, help="simulated ranks")] = 8,
    epochs: Annotated[int, typer.Option(min=1)] = 20,
    batch: Annotated[int, typer.Option(min=1, help="images per rank and step")] = 16,
    lr: Annotated[float, typer.Option(help="the largest learning rate of the schedule")] = 0.05,
    seeds: Annotated[str, typer.Option(help="comma-separated")] = "0,1,2",
    output: Annotated[Path, typer.Option(help="results; those in the file are kept")] = Path("runs/digits_ranks.json"),
    write: Annotated[bool, typer.Option(help="write the section of docs/exchanges.md from the results")] = False,
) -> None:
    """Trains with each method and seed."""
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = json.loads(output.read_text()) if output.exists() else []
    for seed in map(int, seeds.split(",")):
        for method in filter(None, methods.split(";")):
            if any((row["method"], row["seed"]) == (method, seed) for row in rows):
                continue
            row = {"method": method, "seed": seed, **train(METHODS[method], ranks, epochs, batch, lr, seed)}
            print(row, flush=True)
            rows.append(row)
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps(rows, indent=1))
    if write:
        doc_sections.write(DOC, "digits", "Accuracy with many ranks", text(rows, ranks, epochs, batch))


if __name__ == "__main__":
    typer.run(main)
