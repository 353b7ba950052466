"""The containers that an adapter makes of given gradients, and what these are reduced to: equal in all frameworks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from hvd_deepreduce import Config
from hvd_deepreduce.pipeline import Pipeline
from tests.adapters.common import on
from tests.adapters.scopes import SCOPES

COMPARED = "containers_and_sums_of_given_gradients"
"""The case of each framework that returns ``of_each_config``."""
CONFIGS = [
    {"min_elements": 0},
    {"sparsifier": "randomk", "value": "natural", "seed": 3, "min_elements": 0},
    {"sparsifier": {"name": "topk", "density": 0.1}, "index": {"name": "bloom", "policy": "p2"}, "min_elements": 100},
    {"sparsifier": "none", "value": {"name": "qsgd", "bits": 4}, "error_feedback": False},
    *({**scope, "sparsifier": {"name": "topk", "density": 0.05}, "seed": 7} for scope in SCOPES),
]
SHAPES = [(30, 40), (7,), (2000,), (3, 3, 8, 20), (40,)]
EQUAL = "containers_in_equal_buckets"
"""The cases, under Horovod and in DDP, that return ``of_equal_buckets``."""
IN_BUCKETS = [
    {},
    {"value": {"name": "qsgd", "bits": 4}, "seed": 3},
    {"selection": "tensor", "value": "natural"},
    {"sparsifier": "randomk", "value": "raw", "seed": 5},
]


def parameters(step, rank=0):
    """Gradients of all parameters, by name, in the model's order."""
    rng = np.random.default_rng([step, rank])
    kinds = [(shape, np.float64 if len(shape) == 4 else np.float32) for shape in SHAPES]
    return {f"p{at}": (rng.standard_normal(shape) ** 3).astype(kind) for at, (shape, kind) in enumerate(kinds)}


def layers(step, rank=0):
    """Horovod's adapter and DDP make the same two buckets of these: one for each dtype."""
    rng = np.random.default_rng([step, rank, 7])
    kinds = [((20 + number, 30), np.float32 if number > 1 else np.float64) for number in range(4)]
    return {f"p{at}": (rng.standard_normal(shape) ** 3).astype(kind) for at, (shape, kind) in enumerate(kinds)}


@contextmanager
def watched() -> Iterator[list[bytes]]:
    """All containers that pipelines make of whole vectors, and of the sums of slices, meanwhile."""
    encode, sent = Pipeline.encode, []

    def watching(*arguments, **settings):
        packed = encode(*arguments, **settings)
        sent.append(packed.tobytes())
        return packed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pipeline, "encode", watching)
        yield sent


def _steps(given, config):
    """Of three steps, the containers in the order in which they were encoded, and what is reduced."""
    with watched() as sent:
        job = on.given(given(0), config)
        for step in range(3):
            reduced = job.reduced(list(given(step, on.rank()).values()))
            yield list(sent), [one.tobytes() for one in reduced]
            sent.clear()


def of_each_config():
    """For each config, all containers, sorted, and reduced gradients of all steps, in hexadecimal digits."""
    return [
        [part.hex() for sent, sums in _steps(parameters, Config.load(config)) for part in (*sorted(sent), *sums)]
        for config in CONFIGS
    ]


def of_equal_buckets():
    """As ``of_each_config``, for scope ``bucket``; the containers in the order in which they were encoded."""
    return [
        [part.hex() for sent, sums in _steps(layers, {**config, "scope": "bucket"}) for part in (*sent, *sums)]
        for config in IN_BUCKETS
    ]
