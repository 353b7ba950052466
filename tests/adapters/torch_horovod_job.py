"""The job of PyTorch under Horovod (see common.py)."""

from __future__ import annotations

import horovod.torch as hvd
import torch

from hvd_deepreduce.torch import DeepReduce
from tests import cuda_emulator
from tests.adapters.common import NUMBERS
from tests.adapters.torch_job import TorchJob, network


def named(model, prefix):
    return [(f"{prefix}.{name}", p) for name, p in model.named_parameters()]


class OnDevice(DeepReduce):
    """As if its gradients were on a GPU: the CUDA kernels process them, in the emulator."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self._tensors.array = lambda flat: cuda_emulator.from_dlpack(flat) if flat.is_floating_point() else flat.numpy()


class HorovodJob(TorchJob):
    def __init__(
        self, config, *, seed=0, model=None, dtype=None, make=torch.optim.SGD, lr=0.1, device=False, passes=1,
        **options,
    ):  # fmt: skip
        self.model = self.called = (network(seed) if model is None else model).to(dtype)
        if isinstance(config, dict) and config and config.get("scope", "tensor") == "tensor":
            config = {"min_elements": 0, **config}
        self.config, self.passes = config, passes
        kind = OnDevice if device else DeepReduce
        self.compression = hvd.Compression.none if config is None else kind(self.model, config or None)
        pairs = named(self.model, f"job{next(NUMBERS)}")
        self.optimizer = hvd.DistributedOptimizer(
            make(self.model.parameters(), lr=lr), pairs, self.compression, passes, **options
        )

    @property
    def engine(self):
        return self.compression._engine

    def reduced(self, step, factor=1.0):
        self.backward(step, factor)
        self.optimizer.synchronize()
        return self.gradient_arrays()

    def apply(self):
        with self.optimizer.skip_synchronize():
            self.optimizer.step()

    def resumed(self, saved):
        other = HorovodJob(self.config, seed=5)
        other.load(saved)
        return other
