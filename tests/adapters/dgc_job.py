"""A job with the memory ``dgc`` on two tensors, and what all of its ranks do, by the oracle: for both frameworks."""

from __future__ import annotations

from functools import partial

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


def totals(scope, ranks, steps, sent):
    """The sum over the ranks of what they send in each step: all tensors, one after the other.

    Args:
        sent: what a rank sends of a part: of two lists that it keeps, zeros at first, of its gradient and the step.
    """
    parts = SIZES if scope == "tensor" else (sum(SIZES),)
    kept = [[([0.0] * size, [0.0] * size) for size in parts] for _ in range(ranks)]
    for step in range(steps):
        total = np.zeros(sum(SIZES))
        for rank, of_rank in enumerate(kept):
            whole, begin = np.concatenate(gradients(step, rank)), 0
            for size, own in zip(parts, of_rank, strict=True):
                for at, value in sent(*own, whole[begin : begin + size].tolist(), step).items():
                    total[begin + at] += value
                begin += size
        yield total


def _sent(ranks, velocity, residual, gradient, _):
    sent = dgc.step(velocity, residual, gradient, 0.8, int(0.2 * len(gradient)), most=CLIP / ranks**0.5)
    return {at: value / ranks for at, value in sent.items()}


def means(scope, ranks):
    """What the optimizer gets in each step: all tensors, one after the other."""
    return totals(scope, ranks, STEPS, partial(_sent, ranks))
