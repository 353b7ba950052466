"""Top-k by a full sort: larger magnitudes first, and the lower index first if magnitudes are equal."""

import numpy as np


def select(values: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    order = np.lexsort((np.arange(values.size), -np.abs(values)))
    indices = np.sort(order[:k])
    return indices.astype(np.uint32), values[indices]
