"""The containers that an adapter makes of the same gradients, and what these are reduced to, to be compared.

    mpirun -np 2 python tests/adapters/containers.py torch|tensorflow OUT        # each rank writes OUT.<rank>
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np

from tests.adapters.scopes import SCOPES

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

    hvd.init()
    named = [(str(i), torch.nn.Parameter(torch.from_numpy(g.copy()))) for i, g in enumerate(gradients(0))]
    compression = DeepReduce(named, config)
    sent = watched(compression)
    for step in range(3):
        contexts = []
        for (_, parameter), gradient in zip(named, gradients(step, hvd.rank()), strict=True):
            parameter.grad = torch.from_numpy(gradient)
            contexts.append(compression.compress(parameter.grad))
        carriers = [hvd.allreduce_async(carrier, str(i)) for i, (carrier, _) in enumerate(contexts)]
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

    hvd.init()
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
    """All containers that its pipeline makes."""
    pipeline, sent = compression._engine.pipeline, []
    encode = pipeline.encode

    def watching(*arguments):
        packed = encode(*arguments)
        sent.append(packed.tobytes())
        return packed

    pipeline.encode = watching
    return sent


if __name__ == "__main__":
    make = {"torch": by_torch, "tensorflow": by_tensorflow}[sys.argv[1]]
    made = [[part.hex() for step in make(config) for part in step] for config in CONFIGS]
    rank = os.environ.get("OMPI_COMM_WORLD_RANK", "0")
    Path(f"{sys.argv[2]}.{rank}").write_text(json.dumps(made))
