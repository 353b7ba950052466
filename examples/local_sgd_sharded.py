"""As torchtitan trains: replicas, each of them sharded or tensor-parallel. They exchange updates every few steps.

    torchrun --standalone --nproc-per-node 4 examples/local_sgd_sharded.py

`--mesh 2 2 1` has two replicas, two shards, and no tensor parallelism.
"""

import argparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hvd_deepreduce.torch import LocalSGD
from hvd_deepreduce.torch.checkpoint import checkpointed

parser, names, folder = argparse.ArgumentParser(), ("replicate", "shard", "tensor"), "runs/sharded"
parser.add_argument("--mesh", nargs=3, type=int, default=(2, 1, 2), metavar=names)
dist.init_process_group("gloo")  # "nccl" on GPUs, and their device in the mesh
mesh = init_device_mesh("cpu", tuple(parser.parse_args().mesh), mesh_dim_names=names)


def build():
    torch.manual_seed(0)  # the replicas begin alike
    blocks = [torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)) for _ in "ab"]
    model = torch.nn.Sequential(*blocks, torch.nn.Linear(64, 1))
    for block in blocks:
        parallelize_module(block, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for module in [*blocks, model]:
        fully_shard(module, mesh=mesh["shard"])
    inner = torch.optim.AdamW(model.parameters(), lr=0.002)  # dense's times the root of the replicas
    return model, LocalSGD(inner, model, "adamw_small", process_group=mesh["replicate"].get_group())


model, optimizer = build()
torch.manual_seed(dist.get_rank() // mesh["tensor"].size())  # tensor-parallel ranks have the same samples
inputs = torch.randn(512, 64)
targets = inputs[:, :4].sum(1, keepdim=True).tanh()
losses = []
for step in range(120):
    if step == 60:  # as after an interruption
        dcp.save({"model": model.state_dict(), "optimizer": checkpointed(optimizer)}, checkpoint_id=folder)
        optimizer.close()
        model, optimizer = build()
        state = {"model": model.state_dict(), "optimizer": checkpointed(optimizer, folder)}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
    optimizer.zero_grad()
    losses.append(torch.nn.functional.mse_loss(model(inputs), targets))
    losses[-1].backward()
    optimizer.step()
optimizer.sync()
if dist.get_rank() == 0:
    share = 1 / optimizer.stats()["total"]["compression_ratio"]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, sent {share:.1%} of the dense bytes")
optimizer.close()
dist.destroy_process_group()
