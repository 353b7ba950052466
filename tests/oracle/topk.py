"""Top-k by a full sort: larger magnitudes first, and the lower index first if magnitudes are equal; never zeros."""

import numpy as np


def select_of_nonzeros(values: np.ndarray, density: float) -> tuple[np.ndarray, np.ndarray]:
    """The share ``density`` of the elements that are not zero, at least one of them."""
    nonzeros = sum(1 for value in values.tolist() if value)
    return select(values, min(nonzeros, max(1, int(density * nonzeros * (1 + 1e-12)))))


def select(values: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    order = np.lexsort((np.arange(values.size), -np.abs(values)))
    indices = np.array(sorted(i for i in order[:k] if values[i] != 0), np.uint32)
    return indices, values[indices]
