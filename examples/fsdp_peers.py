"""A model that FSDP2 shards within each peer; peers exchange in each step, and do not stop each other.

    for peer in 0 1; do torchrun --standalone --nproc-per-node 2 examples/fsdp_peers.py $peer & done; wait

The argument is the peer's number. A peer that was killed goes on from its checkpoint: start it again.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hvd_deepreduce.exchange.store import SharedStore
from hvd_deepreduce.torch import PeerOptimizer, SignMomentum
from hvd_deepreduce.torch.checkpoint import checkpointed

peer = int(sys.argv[1])
folder = sys.argv[2] if len(sys.argv) > 2 else "runs/fsdp_peers"  # a new one for each job
saved = Path(folder, f"checkpoints{peer}")
dist.init_process_group("gloo")  # "nccl" on GPUs, and their device in the mesh
mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # of this peer alone
torch.manual_seed(0)  # the same parameters on all peers
blocks = [torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)) for _ in range(2)]
model = torch.nn.Sequential(*blocks, torch.nn.Linear(64, 1))
for block in [*blocks, model]:
    fully_shard(block, mesh=mesh)
inner = SignMomentum(model.parameters(), lr=0.008)
slower = torch.optim.lr_scheduler.CosineAnnealingLR(inner, 100)
store = SharedStore(f"{folder}/store", peer=peer, peers=2)
optimizer = PeerOptimizer(inner, model, "sign_momentum", store=store, scheduler=slower)
if found := sorted(saved.glob("*/.metadata")):  # which is written last
    last = found[-1].parent
    state = {"model": model.state_dict(), "optimizer": checkpointed(optimizer, last)}
    dcp.load(state, checkpoint_id=last)
    model.load_state_dict(state["model"])
    optimizer.sync()  # takes the steps that the other peers have taken meanwhile
torch.manual_seed(1 + 1000 * peer + dist.get_rank())  # every rank has its own samples
inputs = torch.randn(512, 64)
targets = inputs.sum(1, keepdim=True).sin()
losses = []
while slower.last_epoch < 100:  # which counts all peers' steps, also those that this one has missed
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if len(losses) % 25 == 0:
        state = {"model": model.state_dict(), "optimizer": checkpointed(optimizer)}
        dcp.save(state, checkpoint_id=saved / f"{slower.last_epoch:03}")
if losses and dist.get_rank() == 0:
    share = 1 / optimizer.stats()["total"]["compression_ratio"]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, sent {share:.1%} of the dense bytes")
optimizer.close()
dist.destroy_process_group()
