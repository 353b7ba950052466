"""A peer of test_peers.py: trains, writes a line after each step, and a checkpoint of each rank.

One rank trains with LocalSGD; two share the model by FSDP, and train with PeerOptimizer.
"""

from __future__ import annotations

import json
import os
import time
from hashlib import blake2b
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parameters_to_vector

from hvd_deepreduce.exchange.store import SharedStore
from hvd_deepreduce.torch import LocalSGD, PeerOptimizer, SignMomentum
from hvd_deepreduce.torch.tensors import own
from tests.adapters.common import LOSSY


def main(folder: str, number: str, steps: str, pause: str, state: str | None = None) -> None:
    peer, rank, ranks = int(number), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if ranks > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 4))
    if ranks > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    store = SharedStore(Path(folder) / "job", peer=peer, peers=4, wait=2.0)
    if ranks == 1:
        config = {**LOSSY, "scope": "model", "value": "qsgd", "local": {"every": 2, "momentum": 0.5}}
        optimizer = LocalSGD(torch.optim.AdamW(model.parameters(), lr=0.01), model, config, store=store)
    else:
        inner = SignMomentum(model.parameters(), 0.01)
        slower = torch.optim.lr_scheduler.StepLR(inner, 10, 0.7)
        optimizer = PeerOptimizer(inner, model, "sign_momentum", store=store, scheduler=slower)
    if state:
        kept = torch.load(f"{state}.{rank}", weights_only=True)
        with torch.no_grad():
            for one, values in zip(model.parameters(), kept["model"], strict=True):
                own(one).copy_(values)
        optimizer.load_state_dict(kept["optimizer"])
    updates = optimizer._updates
    for step in range(int(steps)):
        time.sleep(float(pause))
        x = torch.randn(16, 20, generator=torch.Generator().manual_seed(100 * step + 10 * rank + peer))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
        loss.backward()
        optimizer.step()
        shared = parameters_to_vector(map(own, updates.anchors or model.parameters()))
        said = [None] * ranks
        mine = blake2b(shared.detach().numpy().tobytes()).hexdigest()
        if ranks > 1:
            dist.all_gather_object(said, mine)
        path = f"{folder}/state{peer}.{rank}"
        parts = [own(one).detach() for one in model.parameters()]
        torch.save({"model": parts, "optimizer": optimizer.state_dict()}, f"{path}.new")
        os.replace(f"{path}.new", path)
        if rank == 0:
            done = updates.fragments[0].outer_steps
            print(json.dumps([done, " ".join(filter(None, said)) or mine, loss.item()]), flush=True)
    if ranks > 1:
        dist.destroy_process_group()
