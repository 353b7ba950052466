"""Horovod Elastic on PyTorch: ranks may join, leave and fail. Here 2 ranks, as examples/hosts.sh says.

    horovodrun --gloo --network-interfaces lo -np 2 --min-np 1 --max-np 3 --host-discovery-script examples/hosts.sh python examples/torch_elastic.py

docs/elastic.md explains what happens.
"""  # noqa: E501

import horovod.torch as hvd
import torch

from hvd_deepreduce.torch import DeepReduce

hvd.init()
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
compression = DeepReduce(model, "recommended")
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05), named_parameters=model.named_parameters(), compression=compression
)


@hvd.elastic.run
def train(state):
    torch.manual_seed(hvd.rank())  # every rank has its own samples
    inputs = torch.randn(512, 64)
    while state.step < 100:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True).sin())
        loss.backward()
        optimizer.step()
        state.losses = [*state.losses, hvd.allreduce(loss.detach(), name="loss").item()]
        state.step += 1
        state.commit()


state = hvd.elastic.TorchState(model=model, optimizer=optimizer, compression=compression, step=0, losses=[])
train(state)
if hvd.rank() == 0:
    sent, dense = (compression.stats()["total"][kind] for kind in ("bytes_sent", "dense_bytes"))
    print(f"loss {state.losses[0]:.3f} -> {state.losses[-1]:.3f}, sent {sent / dense:.1%} of the dense bytes")
