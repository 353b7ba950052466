"""Sparse linear models: loss against bytes and modelled time for the methods of SKCompress and for ours.

    python scripts/linear_figures.py --write          # all sections of docs/linear.md
    python scripts/linear_figures.py table --scale 100

All ranks are in one process. Each makes real containers of its own gradient; the driver, which is a node of its own as
in SKCompress (section 7.1), decodes, adds up and encodes again. Bytes are counted, times of computing are measured, and
times of the network are modelled: the driver's link passes all containers, one after the other.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import linear_data
import numpy as np
from linear_data import Batch
from linear_exchange import Endpoint
from linear_models import LOSSES, Model

from hvd_deepreduce import Config

KEYS = {"sparsifier": "nonzero", "index": "raw", "error_feedback": False}
SKETCH = {"buckets": 128, "center": "middle"}


class Method(NamedTuple):
    """A row of the table: its config, and the one of the way down, if another."""

    config: dict[str, Any]


METHODS: dict[str, Method] = {
    "Adam": Method({**KEYS, "value": "raw"}),
    "ZipML, 16 bits": Method({**KEYS, "value": {"name": "uniform", "bits": 16}}),
    "SKCompress": Method({"sparsifier": "nonzero", "joint": {"name": "skcompress", **SKETCH}, "error_feedback": False}),
}


class Data(NamedTuple):
    """What all runs share: the batches of each rank, and the rows to test on."""

    numel: int
    ranks: list[list[Batch]]
    test: Batch


def make_data(scale: float, ranks: int, share: float, seed: int) -> Data:
    count, numel = linear_data.scaled_kdd10(scale)
    train, test = linear_data.generated(count, numel, seed).split(seed)
    own = [train[np.arange(train.labels.size * r // ranks, train.labels.size * (r + 1) // ranks)] for r in range(ranks)]
    return Data(numel, [linear_data.batches(rows, share) for rows in own], Batch.of(test))


def simulate(
    data: Data, config: Config, model: str, lr: float, epochs: int, l2: float, optimizer: str, seed: int, gbit: float
) -> list[dict[str, float]]:
    """One training; a row for each epoch, with sums since the beginning."""
    ranks, loss = len(data.ranks), LOSSES[model]
    endpoints = [Endpoint(config, rank, ranks, data.numel, 1) for rank in range(ranks)]
    weights, rows = Model(data.numel, optimizer, lr, l2), []
    up = down = 0
    seconds = 0.0
    for epoch in range(epochs):
        for number in linear_data.epoch_order(len(data.ranks[0]), seed, epoch):
            begin = time.perf_counter()
            packed = [
                one.containers(weights.gradient(batches[number], loss))[0]
                for one, batches in zip(endpoints, data.ranks, strict=True)
            ]
            seconds += (time.perf_counter() - begin) / ranks  # the ranks do this at the same time
            begin = time.perf_counter()
            summed = endpoints[0].serve(np.concatenate(packed))
            mean = endpoints[0].mean(summed)
            for one in endpoints[1:]:
                one.step += 1
            weights.step(mean)
            seconds += time.perf_counter() - begin
            up += sum(one.size for one in packed)
            down += ranks * summed.size
        rows.append(
            {
                "loss": weights.losses(data.test, loss) / data.test.labels.size,
                "up": up,
                "down": down,
                "compute": seconds,
                "seconds": seconds + 8e-9 * (up + down) / gbit,
            }
        )
    return rows
