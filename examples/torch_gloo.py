"""PyTorch, started with horovodrun: settings as keyword arguments, changed between two steps.

    horovodrun --gloo -np 2 -H localhost:2 python examples/torch_gloo.py

With --gloo, Horovod needs no MPI.
"""

import horovod.torch as hvd
import torch

from hvd_deepreduce.torch import DeepReduce

hvd.init()
torch.manual_seed(hvd.rank())  # every rank has its own samples
inputs = torch.randn(512, 64)
targets = inputs.sum(1, keepdim=True).sin()
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
compression = DeepReduce(model, sparsifier={"name": "topk", "density": 0.1}, index="rice", value="half")
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05), named_parameters=model.named_parameters(), compression=compression
)
losses = []
for step in range(100):
    if step == 20:  # on all ranks: fewer elements once training is under way
        compression.set_config(sparsifier={"name": "topk", "density": 0.01})
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    losses.append(hvd.allreduce(loss.detach(), name="loss").item())
if hvd.rank() == 0:
    total = compression.stats()["total"]
    share = total["bytes_sent"] / total["dense_bytes"]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, sent {share:.1%} of the dense bytes")
