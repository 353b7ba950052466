"""PyTorch with AdamW under torchrun, without Horovod: updates are compressed in place of gradients.

    torchrun --standalone --nproc-per-node 2 examples/local_sgd_torchrun.py

The model is not wrapped in DistributedDataParallel, which would send all gradients besides.
"""

import torch
import torch.distributed as dist

from hvd_deepreduce.torch import LocalSGD

dist.init_process_group("gloo")  # or "nccl", on GPUs
torch.manual_seed(0)  # the same parameters on all ranks
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
torch.manual_seed(1 + dist.get_rank())  # every rank has its own samples
inputs = torch.randn(512, 64)
targets = inputs.sum(1, keepdim=True).sin()
inner = torch.optim.AdamW(model.parameters(), lr=0.003)  # dense's times the root of the ranks
optimizer = LocalSGD(inner, model, "adamw_small", process_group=dist.group.WORLD)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
losses = []
for _ in range(100):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
optimizer.sync()  # all ranks have the same parameters; each saves optimizer.state_dict() of its own
if dist.get_rank() == 0:
    share = 1 / optimizer.stats()["total"]["compression_ratio"]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, sent {share:.1%} of the dense bytes")
dist.destroy_process_group()
