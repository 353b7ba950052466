"""A job of signs of scaled momentum on two tensors, and what all of its ranks do, by the oracle."""

from __future__ import annotations

from tests.adapters import dgc_job
from tests.oracle import scaled_momentum

SIZES, gradients = dgc_job.SIZES, dgc_job.gradients
STEPS = 6
SCOPES = ("tensor", "bucket")
MEMORY = {"decay": 0.9, "beta2": 0.8, "eps": 0.1, "clip": 6.0}
"""In the first step all elements are scaled to 1, but for eps. The clipping applies to some gradients."""


def config(scope):
    return {
        "sparsifier": {"name": "topk", "density": 0.3}, "value": {"name": "sign", "magnitude": "one"}, "scope": scope,
        "memory": {"name": "scaled_momentum", **MEMORY},
    }  # fmt: skip


def _sent(square, momentum, gradient, step):
    return scaled_momentum.step(square, momentum, gradient, step + 1, k=int(0.3 * len(gradient)), **MEMORY)


def sums(scope, ranks):
    """The sum of all ranks' votes in each step: all tensors, one after the other."""
    return dgc_job.totals(scope, ranks, STEPS, _sent)
