"""A job that makes many models, trains each for a step and drops it: nothing of them may be left. See test_torch.py."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable

import horovod.torch as hvd
import psutil
import pytest
import torch
from mpi4py import MPI

from hvd_deepreduce.torch import DeepReduce

WIDTH = 600
"""Of a model, whose parameters take 1.5 MB; with gradients, residuals and buckets 6 MB."""


def trained(close: bool) -> tuple[torch.optim.Optimizer, torch.nn.Module, DeepReduce]:
    """A model after one step; its DeepReduce is closed or not."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 10))
    compression = DeepReduce(model, scope="model", exchange="densestream")
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression
    )
    model(torch.randn(3, WIDTH)).sum().backward()
    optimizer.step()
    if close:
        compression.close()
    return optimizer, model, compression


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("deepreduce")]


def communicators() -> int:
    """A number that grows with the communicators that exist: MPI gives a new one the smallest that is free."""
    probe = MPI.COMM_SELF.Dup()
    number = probe.py2f()
    probe.Free()
    return number


def reached(condition: Callable[[], bool]) -> bool:
    """Whether it holds soon: threads end, and communicators are freed, after the object is gone."""
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def dropped(models: int, close: bool) -> None:
    """Makes so many models and drops them. Nothing that they had is left."""
    left: list[weakref.ref[object]] = []
    before, memory = communicators(), 0
    for number in range(models):
        optimizer, model, compression = trained(close)
        left += [weakref.ref(one) for one in (optimizer, model, model[0].weight, compression, compression._engine)]
        del optimizer, model, compression
        gc.collect()
        if number == 3:
            memory = psutil.Process().memory_info().rss
    assert not [one for one in left if one() is not None]
    assert reached(lambda: not threads()), threads()
    assert reached(lambda: communicators() == before), (before, communicators())
    grown = (psutil.Process().memory_info().rss - memory) / 1e6
    assert grown < 2 * (models - 4), f"{grown:.0f} MB are left of {models - 4} models"


hvd.init()
torch.set_num_threads(1)
gc.freeze()  # the collector need not go through all that PyTorch made while it was imported
dropped(20, close=False)
dropped(8, close=True)

# Horovod's optimizer keeps a DeepReduce that was closed. It holds nothing, and says so when it is used.
optimizer, model, compression = trained(close=True)
compression.close()
assert not threads() and model[0].weight._post_accumulate_grad_hooks == {}
assert compression.stats()["total"]["steps"] == 1 and compression.config.scope == "model"
with pytest.raises(RuntimeError, match=r"this was closed, by close\(\): create a new one on every rank"):
    model(torch.randn(3, WIDTH)).sum().backward()
for use in (compression.state_dict, lambda: compression.load_state_dict({}), lambda: compression.set_config(seed=1)):
    with pytest.raises(RuntimeError, match="this was closed"):
        use()

# A DeepReduce goes and the model stays: its hooks are gone, and another one takes its place.
del optimizer, compression
gc.collect()
with DeepReduce(model) as compression:
    assert len(model[0].weight._post_accumulate_grad_hooks) == 1
    model[0].weight.grad = None
assert model[0].weight._post_accumulate_grad_hooks == {}
compression = DeepReduce(model)
del compression
gc.collect()
assert model[0].weight._post_accumulate_grad_hooks == {}

# One that nobody closed must not keep the process from ending.
optimizer, model, compression = trained(close=False)
print(f"rank {hvd.rank()} is done", flush=True)
hvd.shutdown()
