"""DistributedDataParallel without Horovod and MPI, with a checkpoint of each rank.

    torchrun --standalone --nproc-per-node 2 examples/ddp_torchrun.py
"""

import tempfile

import torch
import torch.distributed as dist

from hvd_deepreduce.torch import ddp

dist.init_process_group("gloo")  # "nccl" on GPUs
rank = dist.get_rank()
torch.manual_seed(rank)  # every rank has its own samples
inputs = torch.randn(512, 64)
targets = inputs.sum(1, keepdim=True).sin()
layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
model = torch.nn.parallel.DistributedDataParallel(layers)
state = ddp.DeepReduceState("recommended", start_iter=5)  # the first 5 iterations are dense
model.register_comm_hook(state, ddp.deepreduce_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
losses = []
for _step in range(150):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
with tempfile.NamedTemporaryFile() as file:  # residuals differ between ranks: each saves its own
    torch.save({"model": layers.state_dict(), "compression": state.state_dict()}, file.name)
    state.load_state_dict(torch.load(file.name)["compression"])
if rank == 0:
    total = state.stats()["total"]
    share = total["bytes_sent"] / total["dense_bytes"]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, sent {share:.1%} of the dense bytes")
dist.destroy_process_group()
