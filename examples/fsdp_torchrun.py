"""A model that FSDP2 shards over two ranks, on two replicas; gradients between the replicas are compressed.

    torchrun --standalone --nproc-per-node 4 examples/fsdp_torchrun.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hvd_deepreduce.torch.fsdp import compress_replicas

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
rank = dist.get_rank()
mesh = init_device_mesh(device, (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(0)  # the replicas begin alike
blocks = [torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)) for _ in range(2)]
model = torch.nn.Sequential(*blocks, torch.nn.Linear(64, 1)).to(device)
for block in [*blocks, model]:
    fully_shard(block, mesh=mesh["shard"])
compression = compress_replicas(model, mesh["replicate"], "recommended")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
torch.manual_seed(rank)  # every rank has its own samples
inputs = torch.randn(512, 64, device=device)
targets = inputs.sum(1, keepdim=True).sin()
losses = []
for _step in range(100):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
if rank == 0:
    total = compression.stats()["total"]
    share = total["bytes_sent"] / total["dense_bytes"]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, sent {share:.1%} of the dense bytes")
compression.close()
dist.destroy_process_group()
