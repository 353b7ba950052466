"""A training job in which the last rank dies in the middle of its third step. Takes the exchange's name."""

import os
import sys

import horovod.torch as hvd
import torch

from hvd_deepreduce.torch import DeepReduce

hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Tanh(), torch.nn.Linear(100, 100))
compression = DeepReduce(model, exchange=sys.argv[1])
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression)


def die(gradient: torch.Tensor) -> None:
    # By now the gradient of the last layer has been encoded and sent; the first layer's never will be.
    os._exit(17)


for step in range(5):
    if step == 2 and hvd.rank() == hvd.size() - 1:
        model[0].weight.register_hook(die)
    optimizer.zero_grad()
    model(torch.randn(8, 100)).square().mean().backward()
    optimizer.step()
    print(f"step {step} done on rank {hvd.rank()}", flush=True)
