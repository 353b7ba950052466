"""PyTorch with AdamW: updates are compressed in place of gradients, every few steps.

    mpirun -np 2 python examples/torch_local_sgd.py

docs/local_updates.md explains it.
"""

import horovod.torch as hvd
import torch

from hvd_deepreduce.torch import LocalSGD

hvd.init()
torch.manual_seed(hvd.rank())  # every rank has its own samples
inputs = torch.randn(512, 64)
targets = inputs.sum(1, keepdim=True).sin()
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
# The learning rate is dense's times the root of the number of ranks.
optimizer = LocalSGD(torch.optim.AdamW(model.parameters(), lr=0.003), model, "adamw_small")
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
losses = []
for _ in range(100):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    schedule.step()
    losses.append(hvd.allreduce(loss.detach(), name="loss").item())
optimizer.sync()  # all ranks have the same parameters
if hvd.rank() == 0:
    total = optimizer.stats()["total"]
    share = total["bytes_sent"] / total["dense_bytes"]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, sent {share:.1%} of the dense bytes")
