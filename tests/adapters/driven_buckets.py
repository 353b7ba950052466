"""Drives ``torch/bucket_driver.py`` as the adapters do, without a model: on the host, or on the emulated GPU."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist

from hvd_deepreduce import Config
from hvd_deepreduce.torch import bucket_driver
from hvd_deepreduce.torch.bucket_driver import Buckets, GradBucket, Made
from hvd_deepreduce.torch.distributed import DistributedCollectives
from hvd_deepreduce.torch.owners import described
from hvd_deepreduce.torch.tensors import TorchTensors, hashes
from tests.adapters.emulated_gpu import emulated_gpu, on_stream, put

SIZES = [[300, 40], [500], [7, 600]]
"""Of each bucket's parameters."""


def vector(step, number, dtype=torch.float32):
    """This rank's gradients of a bucket."""
    random = np.random.default_rng([step, number, dist.get_rank()])
    return torch.from_numpy(random.standard_normal(sum(SIZES[number]), np.float32)).to(dtype)


class DrivenBuckets:
    """
    Args:
        gpu: the emulated one, where the gradients come on a stream of the user's; None: on the host.
        find_unused: as ``Made``.
    """

    def __init__(self, config, gpu=None, find_unused=False):
        self.parameters = [[torch.zeros(size) for size in sizes] for sizes in SIZES]
        self.stream = gpu and gpu.stream("user")
        self.put = put if gpu else lambda tensor: tensor
        with self.within():
            every = [self.put(one).add_(1).requires_grad_() for ones in self.parameters for one in ones]
            trained = {f"p{number}": one for number, one in enumerate(every)}
            tensors = TorchTensors()
            collectives = DistributedCollectives(tensors)
            if gpu:  # another group than the one on the host, as NCCL's is
                collectives._devices = dist.new_group(backend="gloo")
            self.used = set(map(id, trained.values())) if find_unused else None
            made = Made(trained, described(trained), find_unused, self.used, lambda: hashes(trained))
            config = bucket_driver.for_buckets(Config.load(config), 0)
            self.buckets = Buckets(config, collectives, tensors, 0, lambda: made, None)

    def within(self):
        return on_stream(self.stream)

    def take(self, number, given):
        return self.buckets.take(GradBucket(number, self.parameters[number], given, number + 1 == len(SIZES)))

    def step(self, step, dtype=torch.float32):
        """The means."""
        with self.within():
            vectors, futures = [], []
            if self.used is not None:
                self.used.update(id(one) for ones in self.parameters for one in ones)
            for number in range(len(SIZES)):
                vectors.append(self.put(vector(step, number, dtype)).mul_(2))  # by the backward pass
                futures.append(self.take(number, vectors[-1]))
            for future in futures:
                future.wait()
            return [(one + 0).cpu().numpy().copy() for one in vectors]

    def close(self):
        with self.within():
            self.buckets.close()


def compare_with_host(config, **settings):
    """Means and residuals are those on the host, and nothing is out of order."""
    found = []
    for there in (False, True):
        with emulated_gpu() if there else nullcontext() as gpu:
            driven = DrivenBuckets(config, gpu, **settings)
            steps = [*(driven.step(step) for step in range(3)), driven.step(3, torch.float16)]
            kept = {name: one.numpy() for name, one in driven.buckets.state_dict()["residuals"].items()}
            driven.close()
            found.append([*(mean for means in steps for mean in means), *(kept[name] for name in sorted(kept))])
    assert len(found[0]) > 4 * len(SIZES) and len(found[0]) == len(found[1])
    assert all(map(np.array_equal, *found)), config
