"""The sum of sparse vectors, index by index, in a dictionary."""

import numpy as np


def total(parts: list[tuple[np.ndarray, np.ndarray]], dtype: type, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """The union of the supports, sorted, and scale * (0 + each part's value at it, in the order of the parts)."""
    sums: dict[int, np.floating] = {}
    for indices, values in parts:
        for index, value in zip(indices.tolist(), values, strict=True):
            sums[index] = sums.get(index, dtype(0)) + dtype(value)
    union = sorted(sums)
    return np.array(union, np.uint32), np.array([sums[index] * dtype(scale) for index in union], dtype)
