"""Captures gradients from real training, for benchmarks and simulations.

    python scripts/capture_gradients.py --network resnet50 --out data/captured/resnet50.npz

Trains the network on crops of two real photographs. After the last step, it computes one gradient per rank, each from
another batch. The file contains ``gradient_r``, float32 ``[numel]``, for each rank r: the gradients of all parameters
in the order of the model. ``names`` and ``sizes`` are the names and the numbers of elements of the parameters.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from networks import NETWORKS, Photographs
from rich.progress import track
from torch.nn import functional


def capture(network: str, out: Path, steps: int, ranks: int, batch_size: int, classes: int, seed: int) -> None:
    """Trains and writes the file. An interrupted run leaves no partial file at ``out``."""
    torch.manual_seed(seed)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    generator = torch.Generator().manual_seed(seed)
    model, images = NETWORKS[network](classes), Photographs(classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def gradient() -> None:
        optimizer.zero_grad()
        x, labels = images.batch(batch_size, generator)
        functional.cross_entropy(model(x), labels).backward()

    for _ in track(range(steps), f"training {network}"):
        gradient()
        optimizer.step()
    arrays: dict[str, np.ndarray] = {}
    for rank in range(ranks):
        gradient()
        arrays[f"gradient_{rank}"] = torch.cat([p.grad.reshape(-1) for p in model.parameters()]).numpy()
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_suffix(".part.npz")
    np.savez(
        part,
        names=np.array([name for name, _ in model.named_parameters()]),
        sizes=np.array([p.numel() for p in model.parameters()]),
        **arrays,
    )
    os.replace(part, out)


def main(
    network: Annotated[str, typer.Option(help="the network: " + " or ".join(NETWORKS))] = "resnet50",
    out: Annotated[Path | None, typer.Option(help="output file; default: data/captured/NETWORK.npz")] = None,
    steps: Annotated[int, typer.Option(min=0, help="optimizer steps before the capture")] = 30,
    ranks: Annotated[int, typer.Option(min=1, help="number of gradients, each from another batch")] = 4,
    batch_size: Annotated[int, typer.Option(min=2)] = 16,
    classes: Annotated[
        int, typer.Option(min=2, help="number of classes; ResNet-50 has 25.6 M parameters with 1,000")
    ] = 1000,
    seed: int = 0,
) -> None:
    """Captures the gradients of one network."""
    if network not in NETWORKS:
        raise typer.BadParameter(f"network {network!r} is unknown; choose from {', '.join(NETWORKS)}")
    capture(network, out or Path("data/captured") / f"{network}.npz", steps, ranks, batch_size, classes, seed)


if __name__ == "__main__":
    typer.run(main)
