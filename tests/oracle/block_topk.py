"""Block top-k: the whole blocks of largest norm but 0, one block at a time."""

import numpy as np

from tests.oracle.bucket_sum import in_lanes


def norm(block: list[float], l2: bool) -> float:
    """The sum of squares or of magnitudes, in the order that kernels/blocks/blocks.cpp lays down."""
    return min(in_lanes([x * x if l2 else abs(x) for x in block], 8), float(np.finfo(np.float64).max))


def norms(values: np.ndarray, size: int, l2: bool) -> list[float]:
    return [norm(values[at : at + size].astype(np.float64).tolist(), l2) for at in range(0, values.size, size)]


def select(values: np.ndarray, density: float, size: int, l2: bool) -> tuple[np.ndarray, np.ndarray]:
    found = norms(values, size, l2)
    count = min(len(found), max(1, int(density * len(found) * (1 + 1e-12))))
    best = sorted((b for b in range(len(found)) if found[b]), key=lambda b: (-found[b], b))[:count]
    indices = [i for b in sorted(best) for i in range(b * size, min((b + 1) * size, values.size))]
    return np.array(indices, np.uint32), values[indices]
