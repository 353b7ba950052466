"""Accumulation and the sum over ranks, on whole vectors; the sum is in float64."""

import numpy as np


def total(parts: list[tuple[np.ndarray | None, np.ndarray]], numel: int, scale: float) -> np.ndarray:
    """scale * the sum of (indices, values), or (None, all values), in float64."""
    out = np.zeros(numel)
    for indices, values in parts:
        out[slice(None) if indices is None else indices] += values.astype(np.float64)
    return out * scale


def accumulated(residual: np.ndarray, gradient: np.ndarray | None) -> np.ndarray:
    """The sum of both, clipped to the largest finite number."""
    if gradient is None:
        return residual
    limit = np.finfo(residual.dtype).max
    with np.errstate(over="ignore"):
        return np.clip(residual + gradient, -limit, limit)
