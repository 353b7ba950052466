"""Top-k by a full stable sort: larger magnitudes first, and of equal ones the lower index."""

import numpy as np


def select(values: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    order = np.lexsort((np.arange(values.size), -np.abs(values)))
    indices = np.sort(order[:k])
    return indices.astype(np.uint32), values[indices]
