"""Hugging Face Accelerate with FSDP2: shards within a replica, compressed gradients between the replicas.

    torchrun --standalone --nproc-per-node 4 examples/fsdp_accelerate.py

`pip install accelerate` first. `prepare` leaves a model that `fully_shard` was applied to as it is, on GPUs with an
FSDP plugin; `evaluation_mode` does the same everywhere.
"""

import torch
from accelerate import Accelerator
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hvd_deepreduce.torch.fsdp import compress_replicas

accelerator = Accelerator(cpu=True)  # or none, on GPUs
mesh = init_device_mesh(accelerator.device.type, (2, accelerator.num_processes // 2), mesh_dim_names=("far", "near"))
torch.manual_seed(0)  # the replicas begin alike
inputs = torch.randn(1024, 64)
data = torch.utils.data.TensorDataset(inputs, inputs[:, :4].sum(1, keepdim=True).tanh())
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
fully_shard(model, mesh=mesh["near"])
model = accelerator.prepare_model(model, evaluation_mode=True)
optimizer, batches = accelerator.prepare(
    torch.optim.SGD(model.parameters(), lr=0.1), torch.utils.data.DataLoader(data, 64, shuffle=True)
)
replicas = compress_replicas(model, mesh["far"], "recommended")
losses = []
for _epoch in range(20):
    for x, y in batches:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
if accelerator.is_main_process:
    total = replicas.stats()["total"]
    share = total["bytes_sent"] / total["dense_bytes"]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, sent {share:.1%} of the dense bytes")
replicas.close()
accelerator.end_training()
