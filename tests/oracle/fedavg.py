"""A round of FedAvg with DeepReduce (appendix, Algorithm 2), for codecs that lose nothing: by hand, in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def fedavg(
    start: np.ndarray, train: Callable[[int, int, np.ndarray], np.ndarray], rounds: list[list[int]]
) -> np.ndarray:
    """The server's model at the end.

    Args:
        train: of a round, a client and a model: the client's model at the end.
        rounds: the clients that each round draws.
    """
    model = start.astype(np.float64)
    for number, clients in enumerate(rounds):
        total = np.zeros_like(model)
        for client in clients:
            total += model - train(number, client, model)
        model = model - total / len(clients)
    return model
