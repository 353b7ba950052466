"""A picture of codecs: bits against time, coloured by the error. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Point(NamedTuple):
    """One codec or config.

    Attributes:
        name: drawn beside it.
        bits: of each element.
        nanoseconds: of encoding and decoding each element.
        error: relative L2 error.
    """

    name: str
    bits: float
    nanoseconds: float
    error: float


class Panel(NamedTuple):
    """What is drawn into one pair of axes.

    Attributes:
        title: above it.
        element: of which bits and nanoseconds are, such as ``"kept element"``.
        points: at least one.
    """

    title: str
    element: str
    points: list[Point]


def draw(panels: Sequence[Panel], title: str, file: Path) -> None:
    """Plots bits against time, one panel beside the other, into a file that ends as matplotlib knows it (``.png``).

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the file's name does not end as a picture's.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(7, 14 / 3 * len(panels)), 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes_of_all = figure.subplots(1, len(panels), squeeze=False)[0]
    for panel, axes in zip(panels, axes_of_all, strict=True):
        shown = axes.scatter(
            [p.nanoseconds for p in panel.points], [p.bits for p in panel.points],
            c=[math.log10(max(p.error, 1e-4)) for p in panel.points],
            cmap="viridis_r", vmin=-4, vmax=0, s=60, edgecolors="black", linewidths=0.5,
        )  # fmt: skip
        for number, p in enumerate(sorted(panel.points, key=lambda p: p.bits)):
            # Alternate the labels above and below the points, so that those of neighbouring points do not overlap.
            place = (5, 5 if number % 2 else -11)
            axes.annotate(p.name, (p.nanoseconds, p.bits), fontsize=8, xytext=place, textcoords="offset points")
        axes.set_xscale("log")
        axes.set_yscale("log", base=2)
        axes.set_xlabel(f"encode + decode, ns per {panel.element}")
        axes.set_ylabel(f"bits per {panel.element}")
        axes.set_title(panel.title)
        axes.grid(alpha=0.3)
    figure.colorbar(shown, ax=list(axes_of_all), label="log10 of the relative L2 error (index codecs: none)")
    figure.suptitle(title)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
