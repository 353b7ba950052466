"""Files of captured gradients (scripts/capture_gradients.py writes them): their names, and what is in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np

FOLDER = Path(__file__).resolve().parent.parent / "data" / "captured"
Kind = Literal["accumulator", "gradient"]
"""``accumulator``: what a job with error feedback selects from, residual + gradient. ``gradient``: the raw gradient,
which a job without error feedback selects from."""
KINDS = ("accumulator", "gradient")
Vector = np.ndarray[Any, np.dtype[np.float32]]


def path(network: str, density: float, selection: str = "scope", folder: Path = FOLDER) -> Path:
    """The file of a network that was trained at a density, with selection from the whole model or from each tensor."""
    return folder / f"{network}{'' if selection == 'scope' else '_' + selection}_{density:g}.npz"


def read(file: str | Path, kind: str, rank: int) -> Vector:
    """One rank's vector, float32 ``[numel]``.

    Raises:
        ValueError: the file has no such rank. No rank's vector stands in for another's: copies, shuffled or not, do not
            overlap as the ranks of a job do.
    """
    with np.load(file) as arrays:
        name = f"{kind}_{rank}"
        if name not in arrays.files:
            raise ValueError(
                f"{file} has no {name}: it has {rank_count(file)} ranks; capture it with --ranks {rank + 1} or more"
            )
        vector: Vector = arrays[name]
        return vector


def rank_count(file: str | Path) -> int:
    """The number of ranks in a file."""
    with np.load(file) as arrays:
        return sum(name.startswith("gradient_") for name in arrays.files)


def about(file: str | Path) -> dict[str, Any]:
    """How a file was made: network, config, density, steps, ranks, batch size, losses."""
    with np.load(file) as arrays:
        found: dict[str, Any] = json.loads(str(arrays["about"]))
        return found


def parameters(file: str | Path) -> tuple[list[str], list[int]]:
    """The names of the network's parameters and their numbers of elements, in the order of the vectors."""
    with np.load(file) as arrays:
        return arrays["names"].tolist(), arrays["sizes"].tolist()


def describe(file: str | Path, kind: str) -> str:
    """What the vectors of a file are, for the text beside a figure."""
    facts = about(file)
    what = "accumulators (residual + gradient)" if kind == "accumulator" else "raw gradients"
    return (
        f"{what} of {facts['network']} ({facts['numel']:,} elements), after {facts['steps']} steps on {facts['ranks']} "
        f"ranks (batch {facts['batch_size']} each) with the config {facts['config']} at density {facts['density']:g}"
        f"{', selected from each tensor' if facts['selection'] == 'tensor' else ''}"
    )
