"""Captures what a compressed job selects from, for benchmarks and simulations.

    python scripts/bench/capture_gradients.py --network resnet50 --density 0.01 --density 0.1

Trains the network on crops of two real photographs, once for each density, with the compressor in force, on ranks that
one process simulates. After the last step, each rank computes one more gradient. A file (tools/gradient_file.py)
contains, of each rank, this gradient, which a job without error feedback would select from, and the sum of it and the
residual, the accumulator, which this job selects from.

The supports of the two differ: large gradients are clustered in a few rows and channels, while what has waited in the
residual for long is spread nearly at random. So bytes and overlaps measured on one do not hold for the other.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("train",))

import captured
import numpy as np
import torch
import typer
from networks import NETWORKS, Photographs
from rich.progress import track
from simulated_ranks import SimulatedRanks
from simulated_training import Network
from torch.nn import functional

from hvd_deepreduce import Config

CONFIG, STEPS, RANKS, BATCH = "fast", 100, 4, 8


def capture(
    network: str,
    out: Path,
    *,
    density: float,
    config: str = CONFIG,
    selection: str = "scope",
    steps: int = STEPS,
    ranks: int = RANKS,
    batch_size: int = BATCH,
    classes: int = 1000,
    labels: int = 10,
    lr: float = 0.001,
    seed: int = 0,
    threads: int | None = None,
) -> None:
    """Trains and writes the file. An interrupted run leaves no partial file at ``out``.

    Args:
        classes: outputs of the network.
        labels: classes that occur: with more of them, a hundred steps teach the network nothing.
        selection: ``scope``: each rank selects from the whole model as one vector. ``tensor``: from each parameter.
        threads: None: one for each core. On a machine that does other work, one thread is faster than two that wait for
            each other.

    Raises:
        ValueError: the config sums by an exchange over MPI, which one process cannot run.
    """
    settings = Config.load(config, density=density, seed=seed)
    torch.manual_seed(seed)
    threads = threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(seed)
    model, images = NETWORKS[network](classes), Photographs(min(labels, classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    net = Network(model)
    settings = settings.model_copy(update={"scope": "model", "selection": selection})
    job = SimulatedRanks(settings, ranks, net.sizes, threads)
    losses: list[float] = []

    def gradient() -> np.ndarray:
        """The gradient of a new batch, ``[numel]``; its loss is added to that of the step."""
        x, tiles = images.batch(batch_size, generator)
        loss = functional.cross_entropy(model(x), tiles)
        losses[-1] += loss.item() / ranks
        return net.gradient(loss)

    for _ in track(range(steps), f"training {network}, density {density:g}"):
        losses.append(0.0)
        net.step(optimizer, job.mean([gradient() for _ in range(ranks)]))
    vectors: dict[tuple[captured.Kind, int], captured.Vector] = {}
    losses.append(0.0)
    for rank, residual in enumerate(job.residuals):
        vectors["gradient", rank] = gradient()
        if settings.error_feedback:
            vectors["accumulator", rank] = np.add(residual, vectors["gradient", rank], out=residual)
    facts = {
        "network": network, "numel": job.numel, "config": config, "density": density, "selection": selection,
        "steps": steps, "ranks": ranks, "batch_size": batch_size, "classes": classes, "labels": labels, "lr": lr,
        "seed": seed, "losses": losses, "shapes": [list(parameter.shape) for parameter in net.parameters],
    }  # fmt: skip
    captured.write(out, vectors, [name for name, _ in model.named_parameters()], net.sizes, facts)


def main(
    network: Annotated[str, typer.Option(help="the network: " + " or ".join(NETWORKS))] = "resnet50",
    density: Annotated[list[float] | None, typer.Option(help="a density; can be repeated; default: 0.01")] = None,
    folder: Annotated[Path, typer.Option(help="folder for the files")] = captured.FOLDER,
    config: Annotated[str, typer.Option(help="the preset or YAML file of the job")] = CONFIG,
    selection: Annotated[str, typer.Option(help="from the whole model (scope), or each tensor (tensor)")] = "scope",
    steps: Annotated[int, typer.Option(min=0, help="steps before the capture")] = STEPS,
    ranks: Annotated[int, typer.Option(min=1, help="number of ranks")] = RANKS,
    batch_size: Annotated[int, typer.Option(min=2, help="images per rank and step")] = BATCH,
    classes: Annotated[int, typer.Option(min=2, help="outputs of the network")] = 1000,
    labels: Annotated[int, typer.Option(min=2, help="classes that occur")] = 10,
    lr: Annotated[float, typer.Option(help="learning rate of SGD with momentum 0.9")] = 0.001,
    seed: int = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="default: one for each core")] = None,
) -> None:
    """Captures the gradients and accumulators of one network, at each density."""
    if network not in NETWORKS:
        raise typer.BadParameter(f"network {network!r} is unknown; choose from {', '.join(NETWORKS)}")
    if selection not in ("scope", "tensor"):
        raise typer.BadParameter(f"selection {selection!r} is unknown; choose from scope, tensor")
    for one in density or [0.01]:
        out = captured.path(network, one, selection, folder)
        capture(
            network, out, density=one, config=config, selection=selection, steps=steps, ranks=ranks,
            batch_size=batch_size, classes=classes, labels=labels, lr=lr, seed=seed, threads=threads,
        )  # fmt: skip
        losses = captured.about(out)["losses"]
        print(f"{out}: loss {np.mean(losses[:5]):.3f} in the first five steps, {np.mean(losses[-5:]):.3f} in the last")


if __name__ == "__main__":
    typer.run(main)
