"""A training job in which the last rank dies in the middle of its third step."""

import os
import signal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvd_deepreduce.torch import ddp

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it to the others; they are to end by themselves
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
layers = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Tanh(), torch.nn.Linear(100, 100))
model = DistributedDataParallel(layers, bucket_cap_mb=0.01)
model.register_comm_hook(ddp.DeepReduceState(), ddp.deepreduce_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def die(gradient: torch.Tensor) -> None:
    # By now the bucket of the last layer has been given to the hook; the first layer's never will be.
    os._exit(17)


for step in range(5):
    if step == 2 and rank == dist.get_world_size() - 1:
        layers[0].weight.register_hook(die)
    optimizer.zero_grad()
    loss = model(torch.randn(8, 100)).square().mean()
    try:
        loss.backward()
    except RuntimeError as error:
        print(f"RuntimeError from backward on rank {rank}: {error}", flush=True)
        raise
    optimizer.step()
    print(f"step {step} done on rank {rank}", flush=True)
