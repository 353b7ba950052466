"""The containers that an adapter makes of the same gradients, one process alone, to be compared byte for byte.

    python tests/adapters/containers.py torch|tensorflow OUT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

CONFIGS = [
    {"min_elements": 0},
    {"sparsifier": "randomk", "value": "natural", "seed": 3, "min_elements": 0},
    {"sparsifier": {"name": "topk", "density": 0.1}, "index": {"name": "bloom", "policy": "p2"}, "min_elements": 100},
    {"sparsifier": "none", "value": {"name": "qsgd", "bits": 4}, "error_feedback": False},
]
SHAPES = [(30, 40), (7,), (2000,), (3, 3, 8, 20), (40,)]


def gradients(step):
    """Of all parameters, in the model's order."""
    rng = np.random.default_rng(step)
    return [(rng.standard_normal(shape) ** 3).astype(np.float64 if len(shape) == 4 else np.float32) for shape in SHAPES]


def by_torch(config):
    import horovod.torch as hvd
    import torch

    from hvd_deepreduce.torch import DeepReduce

    hvd.init()
    named = [(str(i), torch.nn.Parameter(torch.from_numpy(g.copy()))) for i, g in enumerate(gradients(0))]
    compression = DeepReduce(named, config)
    for step in range(3):
        for (_, parameter), gradient in zip(named, gradients(step), strict=True):
            parameter.grad = torch.from_numpy(gradient)
            _, context = compression.compress(parameter.grad)
            # Of one rank alone, what is gathered is its container.
            yield b"" if context is None else hvd.synchronize(context.handle).numpy().tobytes()
            compression._in_flight.clear()


def by_tensorflow(config):
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from hvd_deepreduce.tensorflow import DeepReduce

    hvd.init()
    compression = DeepReduce(config)

    @tf.function
    def containers(given):
        contexts = [compression.compress(gradient)[1] for gradient in given]
        return [tf.constant([], tf.uint8) if c.container is None else c.container for c in contexts]

    for step in range(3):
        for container in containers([tf.constant(gradient) for gradient in gradients(step)]):
            yield container.numpy().tobytes()


if __name__ == "__main__":
    make = {"torch": by_torch, "tensorflow": by_tensorflow}[sys.argv[1]]
    made = [[container.hex() for container in make(config)] for config in CONFIGS]
    Path(sys.argv[2]).write_text(json.dumps(made))
