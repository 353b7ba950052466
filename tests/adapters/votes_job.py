"""A job of signs of scaled momentum on two tensors, and what all of its ranks do, by the oracle."""

from __future__ import annotations

import numpy as np

from tests.oracle import scaled_momentum

SIZES = (30, 7)
STEPS = 6
SCOPES = ("tensor", "bucket")
MEMORY = {"decay": 0.9, "beta2": 0.8, "eps": 0.1, "clip": 6.0}
"""In the first step all elements are scaled to 1, but for eps. The clipping applies to some gradients."""


def config(scope):
    return {
        "sparsifier": {"name": "topk", "density": 0.3}, "value": {"name": "sign", "magnitude": "one"}, "scope": scope,
        "memory": {"name": "scaled_momentum", **MEMORY},
    }  # fmt: skip


def gradients(step, rank):
    """A rank's gradients of a step, float64."""
    rng = np.random.default_rng(100 * step + rank)
    return [rng.standard_normal(size) * rng.lognormal() for size in SIZES]


def sums(scope, ranks):
    """The sum of all ranks' votes in each step: all tensors, one after the other."""
    parts = SIZES if scope == "tensor" else (sum(SIZES),)
    kept = [[([0.0] * size, [0.0] * size) for size in parts] for _ in range(ranks)]
    for step in range(STEPS):
        total = np.zeros(sum(SIZES))
        for rank, of_rank in enumerate(kept):
            whole, begin = np.concatenate(gradients(step, rank)), 0
            for size, (square, momentum) in zip(parts, of_rank, strict=True):
                part = whole[begin : begin + size].tolist()
                votes = scaled_momentum.step(square, momentum, part, step + 1, k=int(0.3 * size), **MEMORY)
                for at, vote in votes.items():
                    total[begin + at] += vote
                begin += size
        yield total
