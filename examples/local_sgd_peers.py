"""LocalSGD among peers that share only a folder: each is a job of its own, which others do not wait for if it is away.

    for peer in 0 1; do python examples/local_sgd_peers.py $peer & done; wait

The argument is the peer's number. On several sites the folder is on a shared disk, or is the URL of an object store.
"""

import sys

import torch

from hvd_deepreduce.exchange.store import SharedStore
from hvd_deepreduce.torch import LocalSGD

peer = int(sys.argv[1])
folder = sys.argv[2] if len(sys.argv) > 2 else "runs/peers"  # a new one for each job
torch.manual_seed(0)  # the same parameters on all peers
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
torch.manual_seed(1 + peer)  # every peer has its own samples
inputs = torch.randn(512, 64)
targets = inputs.sum(1, keepdim=True).sin()
inner = torch.optim.AdamW(model.parameters(), lr=0.003)  # dense's times the root of the ranks
store = SharedStore(folder, peer=peer, peers=2)
optimizer = LocalSGD(inner, model, "adamw_small", store=store)
losses = []
for _ in range(100):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
optimizer.sync()
share = 1 / optimizer.stats()["total"]["compression_ratio"]
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, sent {share:.1%} of the dense bytes")
