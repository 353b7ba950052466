"""What makes a gradient cheap or dear to compress: how its energy is concentrated, and where its large elements are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvd_deepreduce.codecs.interfaces import U32
from hvd_deepreduce.codecs.sparsify.topk import kept_of
from hvd_deepreduce.ops import select
from hvd_deepreduce.tools.gradient_file import Vector
from hvd_deepreduce.tools.gradients import Gradient
from hvd_deepreduce.tools.measuring import entropy_bits

SHARES = (0.001, 0.01, 0.1)
"""Of the elements, of which the energy is told."""


def of_values(vector: Vector) -> dict[str, Any]:
    """Counts, norm and concentration of a vector, float32 ``[numel]``.

    Returns:
        ``zeros``, ``nan`` and ``infinite`` are counts. The others are there only if all elements are finite, and not
        all are zero: ``norm``, l2; ``largest`` magnitude; ``kurtosis``, E[x^4] / E[x^2]^2, which is 3 for normal
        values; ``energy``, the share of the sum of squares that the largest elements have, by their share of all.
    """
    finite = np.isfinite(vector)
    nan = int(np.isnan(vector).sum())
    found: dict[str, Any] = {
        "zeros": int(vector.size - np.count_nonzero(vector)),
        "nan": nan,
        "infinite": int(vector.size - finite.sum()) - nan,
    }
    if finite.all() and np.any(vector):
        largest = float(np.abs(vector).max())
        squares = np.square(vector.astype(np.float64) / largest)
        energy = float(squares.sum())
        found |= {
            "norm": math.sqrt(energy) * largest,
            "largest": largest,
            "kurtosis": float(np.square(squares).mean()) / (energy / vector.size) ** 2,
            "energy": {f"{share:g}": _energy(vector, share, largest) / energy for share in SHARES},
        }
    return found


def _energy(vector: Vector, share: float, unit: float) -> float:
    _, values = select.topk(vector, None, kept_of(share, vector.size))
    return float(np.square(values.astype(np.float64) / unit).sum())


def of_gaps(indices: U32, numel: int) -> dict[str, float]:
    """The distances between neighbours of a support, beside those of a random support of the same density.

    Elements that are selected independently with probability p have distances with a geometric distribution: 1 with
    probability p, of a median of ceil(-1 / log2(1 - p)), and of an entropy of H(p) / p bits.

    Args:
        indices: sorted, at least two.

    Returns:
        ``neighbours``: the share of distances of 1; ``median``; ``variation``: standard deviation / mean; ``entropy``:
        of the empirical distribution, bits, which is too low where most distances occur once. Each has a companion
        ``random_...``.
    """
    gaps = np.diff(indices).astype(np.int64)
    p = indices.size / numel
    counts = np.unique(gaps, return_counts=True)[1] / gaps.size
    random = {"neighbours": p, "median": 1.0, "variation": 0.0, "entropy": 0.0}
    if p < 1:
        random["median"] = math.ceil(-1 / math.log2(1 - p))
        random["variation"] = math.sqrt(1 - p)
        random["entropy"] = -(p * math.log2(p) + (1 - p) * math.log2(1 - p)) / p
    return {
        "neighbours": float((gaps == 1).mean()),
        "median": float(np.median(gaps)),
        "variation": float(gaps.std() / gaps.mean()),
        "entropy": float(-(counts * np.log2(counts)).sum()),
        **{f"random_{name}": value for name, value in random.items()},
    }


def of_support(indices: U32, sizes: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> dict[str, float]:
    """Bits an index under models that know more and more about where the elements are, and how uneven they lie.

    Args:
        indices: of the whole vector, sorted.
        sizes, shapes: of the parameters, in the order of the vector. A row is an index of the first dimension, and a
            column one of all others together.

    Returns:
        ``whole``: log2 C(d, k) / k. ``tensors``: a coder that is told each parameter's count k_t: the sum of log2
        C(d_t, k_t) and log2 (d_t + 1), / k. ``rows``, ``columns``: one that is told the count of each row, or column,
        of each parameter of two dimensions or more, which takes the counts' empirical entropy. ``row_dispersion`` and
        ``column_dispersion``: the variance of these counts within a parameter, relative to that of a random support of
        the parameter's density; 1 is random. They are 0 where there is nothing to compare.
    """
    numel, kept = sum(sizes), indices.size
    bits = {"whole": entropy_bits(numel, kept), "tensors": 0.0, "rows": 0.0, "columns": 0.0}
    squares = {"row": 0.0, "column": 0.0}
    expected = {"row": 0.0, "column": 0.0}
    ends = np.cumsum(sizes)
    places = np.split(indices, np.searchsorted(indices, ends[:-1])) if len(sizes) > 1 else [indices]
    for begin, shape, own in zip([0, *ends], shapes, places, strict=False):
        size = math.prod(shape)
        whole = entropy_bits(size, own.size) + math.log2(size + 1)
        bits["tensors"] += whole
        height = shape[0] if len(shape) > 1 else 1
        width = size // max(1, height)
        if height < 2 or width < 2 or not own.size:
            bits["rows"] += whole
            bits["columns"] += whole
            continue
        row, column = np.divmod(own.astype(np.int64) - int(begin), width)
        p = own.size / size
        for name, numbers, count, length in (("row", row, height, width), ("column", column, width, height)):
            counts = np.bincount(numbers, minlength=count)
            for one, times in zip(*np.unique(counts, return_counts=True), strict=True):
                bits[f"{name}s"] += int(times) * (entropy_bits(length, int(one)) - math.log2(times / count))
            squares[name] += float(np.square(counts - own.size / count).sum())
            expected[name] += count * length * p * (1 - p)
    found = {name: one / kept for name, one in bits.items()}
    for name, one in expected.items():
        found[f"{name}_dispersion"] = squares[name] / one if one else 0.0
    return found


def selected(gradient: Gradient, density: float) -> tuple[U32, Vector]:
    """Indices and values of the top-k of the whole vector."""
    indices, values = select.topk(gradient.vector, None, kept_of(density, gradient.vector.size))
    return indices, values
