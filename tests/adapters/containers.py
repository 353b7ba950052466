"""The containers that an adapter makes of given gradients, and what these are reduced to: equal in all frameworks."""

from __future__ import annotations

import numpy as np

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


def gradients(step, rank=0):
    """Of all parameters, in the model's order."""
    rng = np.random.default_rng([step, rank])
    return [(rng.standard_normal(shape) ** 3).astype(np.float64 if len(shape) == 4 else np.float32) for shape in SHAPES]


def by_torch(config):
    import horovod.torch as hvd
    import torch

    from hvd_deepreduce.torch import DeepReduce

    named = [(str(i), torch.nn.Parameter(torch.from_numpy(g.copy()))) for i, g in enumerate(gradients(0))]
    compression = DeepReduce(named, config)
    sent = watched(compression)
    for step in range(3):
        contexts = []
        for (_, parameter), gradient in zip(named, gradients(step, hvd.rank()), strict=True):
            parameter.grad = torch.from_numpy(gradient)
            contexts.append(compression.compress(parameter.grad))
        carriers = [hvd.allreduce_async(carrier, name=str(i)) for i, (carrier, _) in enumerate(contexts)]
        reduced = [
            compression.decompress(hvd.synchronize(carrier), context)
            for carrier, (_, context) in zip(carriers, contexts, strict=True)
        ]
        yield [*sorted(sent), *(gradient.numpy().tobytes() for gradient in reduced)]
        sent.clear()


def by_tensorflow(config):
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from hvd_deepreduce.tensorflow import DeepReduce

    compression = DeepReduce(config)
    sent = watched(compression)

    @tf.function
    def reduce(given):
        return [hvd.allreduce(g, compression=compression, name=str(i)) for i, g in enumerate(given)]

    for step in range(3):
        reduced = reduce([tf.constant(gradient) for gradient in gradients(step, hvd.rank())])
        yield [*sorted(sent), *(gradient.numpy().tobytes() for gradient in reduced)]
        sent.clear()


def watched(compression):
    """All containers that its pipeline makes of whole vectors, and of the sums of slices."""
    pipeline, sent = compression._engine.pipeline, []
    encode = pipeline.encode

    def watching(*arguments, **settings):
        packed = encode(*arguments, **settings)
        sent.append(packed.tobytes())
        return packed

    pipeline.encode = watching
    return sent


def of_each_config(steps):
    """For each config, all containers and reduced gradients of all steps, in hexadecimal digits.

    Args:
        steps: ``by_torch`` or ``by_tensorflow``.
    """
    return [[part.hex() for step in steps(config) for part in step] for config in CONFIGS]
