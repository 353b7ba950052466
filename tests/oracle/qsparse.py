"""Qsparse-local-SGD (NeurIPS 2019): Algorithm 1 and its asynchronous operation (section 4), worker by worker; and the
quantizers' beta (section 2), by which lemma 1 divides."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from tests.oracle import topk

Gradient = Callable[[int, int, np.ndarray], np.ndarray]


def beta_qsgd(m: int, s: int, l2: bool = True) -> float:
    """Of m values in s levels. With the largest magnitude as norm (ours), a value's variance is at most
    (norm / 2 s)^2, and norm^2 is at most the sum of the squares."""
    return min(m / s**2 if l2 else m / (2 * s) ** 2, math.sqrt(m) / s)


def beta_uniform(m: int, s: int) -> float:
    return m / (2 * s**2)


def beta_rotated(m: int, s: int) -> float:
    return 2 * math.log2(2 * m) / s**2


def divided(scale: float, beta: float) -> np.float32:
    """A scale that is sent: float32, times the float32 nearest 1 / (1 + beta)."""
    return np.float32(np.float32(scale) * np.float32(1 / (1 + beta)))


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
