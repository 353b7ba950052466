"""A job with the memory ``dgc`` on two tensors, and what all of its ranks do, by the oracle: for both frameworks."""

from __future__ import annotations

import numpy as np

from tests.oracle import dgc

SIZES = (30, 7)
STEPS = 5
CLIP = 6.0  # of some gradients
SCOPES = ("tensor", "model")


def config(scope):
    return {
        "sparsifier": {"name": "topk", "density": 0.2}, "value": "raw", "scope": scope,
        "memory": {"name": "dgc", "momentum": 0.8, "clip": CLIP},
    }  # fmt: skip


def gradients(step, rank):
    """A rank's gradients of a step, float64."""
    rng = np.random.default_rng(100 * step + rank)
    return [rng.standard_normal(size) * rng.lognormal() for size in SIZES]


def means(scope, ranks):
    """What the optimizer gets in each step: all tensors, one after the other."""
    parts = SIZES if scope == "tensor" else (sum(SIZES),)
    kept = [[([0.0] * size, [0.0] * size) for size in parts] for _ in range(ranks)]
    for step in range(STEPS):
        mean = np.zeros(sum(SIZES))
        for rank, of_rank in enumerate(kept):
            whole, begin = np.concatenate(gradients(step, rank)), 0
            for size, (velocity, residual) in zip(parts, of_rank, strict=True):
                part = whole[begin : begin + size].tolist()
                sent = dgc.step(velocity, residual, part, 0.8, int(0.2 * size), most=CLIP / ranks**0.5)
                for at, value in sent.items():
                    mean[begin + at] += value / ranks
                begin += size
        yield mean
