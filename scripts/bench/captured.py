"""Files of captured gradients (scripts/bench/capture_gradients.py writes them): their names, and what is in them."""

from pathlib import Path

from hvd_deepreduce.tools.gradient_file import KINDS, Kind, Vector, about, parameters, rank_count, read, write

__all__ = [
    "FOLDER", "KINDS", "Kind", "Vector", "about", "describe", "parameters", "path", "rank_count", "read", "write",
]  # fmt: skip
FOLDER = Path(__file__).resolve().parents[2] / "data" / "captured"


def path(network: str, density: float, selection: str = "scope", folder: Path = FOLDER) -> Path:
    """The file of a network that was trained at a density, with selection from the whole model or from each tensor."""
    return folder / f"{network}{'' if selection == 'scope' else '_' + selection}_{density:g}.npz"


def describe(file: str | Path, kind: str) -> str:
    """What the vectors of a file are, for the text beside a figure."""
    facts = about(file)
    what = "accumulators (residual + gradient)" if kind == "accumulator" else "raw gradients"
    return (
        f"{what} of {facts['network']} ({facts['numel']:,} elements), after {facts['steps']} steps on {facts['ranks']} "
        f"ranks (batch {facts['batch_size']} each) with the config {facts['config']} at density {facts['density']:g}"
        f"{', selected from each tensor' if facts['selection'] == 'tensor' else ''}"
    )
