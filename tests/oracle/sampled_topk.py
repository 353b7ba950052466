"""DGC's sampled top-k (Lin et al. 2018, section 5), with full sorts of lists."""

import math

import numpy as np

from tests.oracle import threshold, topk
from tests.oracle.randomk import indices_of


def share(density: float, numel: int) -> int:
    return min(numel, max(1, math.floor(density * numel * (1 + 1e-12))))


def select(
    values: np.ndarray, density: float, sample: float, excess: float, key: tuple[int, int, int]
) -> tuple[np.ndarray, np.ndarray]:
    numel = values.size
    if numel == 0:
        return np.empty(0, np.uint32), values
    size = max(share(sample, numel), math.ceil(min(numel, 64 / density)))
    magnitudes = sorted((abs(values[i]) for i in indices_of(numel, size, *key)), reverse=True)
    least = float(magnitudes[share(density, size) - 1])
    indices, kept = threshold.select(values, least)
    if indices.size > excess * share(density, numel):
        places, kept = topk.select(kept, share(density, numel))
        indices = indices[places]
    return indices, kept
