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
    sent = watched(compression._engine)
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
    sent = watched(compression._engine)

    @tf.function
    def reduce(given):
        return [hvd.allreduce(g, compression=compression, name=str(i)) for i, g in enumerate(given)]

    for step in range(3):
        reduced = reduce([tf.constant(gradient) for gradient in gradients(step, hvd.rank())])
        yield [*sorted(sent), *(gradient.numpy().tobytes() for gradient in reduced)]
        sent.clear()


def watched(engine):
    """All containers that its pipeline makes of whole vectors, and of the sums of slices."""
    pipeline, sent = engine.pipeline, []
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


EQUAL = "containers_in_equal_buckets"
"""The cases, under Horovod and under DDP, that return ``of_equal_buckets``."""
IN_BUCKETS = [
    {},
    {"value": {"name": "qsgd", "bits": 4}, "seed": 3},
    {"selection": "tensor", "value": "natural"},
    {"sparsifier": "randomk", "value": "raw", "seed": 5},
]


def layers():
    """Horovod's adapter and DDP make the same two buckets of these: one for each dtype."""
    return {f"{number}": ((20 + number, 30), np.float32 if number > 1 else np.float64) for number in range(4)}


def given(step, rank):
    rng = np.random.default_rng([step, rank, 7])
    return {name: (rng.standard_normal(shape) ** 3).astype(dtype) for name, (shape, dtype) in layers().items()}


def by_horovod(config):
    import horovod.torch as hvd
    import torch

    from hvd_deepreduce.torch import DeepReduce

    named = {name: torch.nn.Parameter(torch.from_numpy(one)) for name, one in given(0, 0).items()}
    compression = DeepReduce(named.items(), config)
    sent = watched(compression._engine)
    for step in range(3):
        contexts = {}
        for name, gradient in reversed(given(step, hvd.rank()).items()):
            named[name].grad = torch.from_numpy(gradient)
            contexts[name] = compression.compress(named[name].grad)
        means = {
            name: compression.decompress(hvd.allreduce(carrier, name=name), context)
            for name, (carrier, context) in contexts.items()
        }
        yield [*sent, *(means[name].numpy().tobytes() for name in named)]
        sent.clear()


def by_ddp(config):
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from hvd_deepreduce.torch import ddp

    class Layers(torch.nn.Module):
        def forward(self, gradients):
            parts = zip(self.parameters(), gradients.values(), strict=True)
            return sum((parameter * torch.from_numpy(gradient)).sum() for parameter, gradient in parts)

    inner = Layers()
    for name, one in given(0, 0).items():
        inner.register_parameter(name, torch.nn.Parameter(torch.from_numpy(one)))
    # Else DDP makes other buckets after the first step, in the order in which the gradients came.
    model = DistributedDataParallel(inner, find_unused_parameters=True)
    state, sent = ddp.DeepReduceState(config), []

    def watching(state, bucket):
        if state._buckets is None:
            sent.append(watched(state.buckets(bucket).engine))
        return ddp.deepreduce_hook(state, bucket)

    model.register_comm_hook(state, watching)
    for step in range(3):
        model.zero_grad()
        model(given(step, dist.get_rank())).backward()
        yield [*sent[0], *(parameter.grad.numpy().tobytes() for parameter in inner.parameters())]
        sent[0].clear()
    state.close()


def of_equal_buckets(steps):
    """As ``of_each_config``, for scope ``bucket``; the containers in the order in which they were encoded."""
    return [[part.hex() for step in steps({**config, "scope": "bucket"}) for part in step] for config in IN_BUCKETS]
