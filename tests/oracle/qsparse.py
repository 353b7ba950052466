"""Qsparse-local-SGD (NeurIPS 2019), Algorithm 1 and its asynchronous operation (section 4), worker by worker."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.oracle import topk

Gradient = Callable[[int, int, np.ndarray], np.ndarray]


def top(vector: np.ndarray, k: int) -> np.ndarray:
    """Top_k as a vector of all elements."""
    indices, values = topk.select(vector, k)
    out = np.zeros_like(vector)
    out[indices] = values
    return out


def qsparse_local_sgd(
    start: np.ndarray, gradient: Gradient, rates: list[float], times: np.ndarray, k: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The master's model and the workers' memories at the end, float64.

    Args:
        gradient: of worker r, at step t, at a model.
        rates: eta of each step.
        times: whether worker r synchronises after step t, ``[T, R]``; with equal columns, this is Algorithm 1.
        k: of Top_k.
    """
    workers = times.shape[1]
    master = start.astype(np.float64)
    read = [master.copy() for _ in range(workers)]  # x_t^(r): what worker r received last
    local = [master.copy() for _ in range(workers)]  # x-hat_t^(r)
    memory = [np.zeros_like(master) for _ in range(workers)]
    for t, eta in enumerate(rates):
        for r in range(workers):
            local[r] = local[r] - eta * gradient(r, t, local[r])
        total = np.zeros_like(master)
        for r in range(workers):
            if times[t, r]:
                progress = memory[r] + read[r] - local[r]
                message = top(progress, k)
                memory[r] = progress - message
                total = total + message
        master = master - total / workers
        for r in range(workers):
            if times[t, r]:
                read[r], local[r] = master.copy(), master.copy()
    return master, memory
