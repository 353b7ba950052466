"""A peer of test_peers.py: trains, writes a line after each step, and a checkpoint of each rank.

One rank trains with LocalSGD; two share the model by FSDP, and train with PeerOptimizer.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parameters_to_vector

from hvd_deepreduce.exchange.store import SharedStore
from hvd_deepreduce.torch import LocalSGD, PeerOptimizer, SignMomentum
from hvd_deepreduce.torch.tensors import own
from hvd_deepreduce.torch.torchft import ManagedQuorum
from tests.adapters.common import LOSSY


def model_of(seed: int, ranks: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 4))
    if ranks > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    return model


def optimizer_of(model: nn.Module, ranks: int, store: SharedStore | ManagedQuorum) -> LocalSGD:
    if ranks == 1:
        config = {**LOSSY, "scope": "model", "value": "qsgd", "local": {"every": 2, "momentum": 0.5}}
        return LocalSGD(torch.optim.AdamW(model.parameters(), lr=0.01), model, config, store=store)
    inner = SignMomentum(model.parameters(), 0.01)
    slower = torch.optim.lr_scheduler.StepLR(inner, 10, 0.7)
    return PeerOptimizer(inner, model, "sign_momentum", store=store, scheduler=slower)


def load(parameters: Iterable[torch.Tensor], optimizer: LocalSGD, state: dict[str, Any]) -> None:
    """A state of this rank's parts of the parameters, and of the optimizer."""
    with torch.no_grad():
        for one, values in zip(parameters, state["model"], strict=True):
            own(one).copy_(values)
    optimizer.load_state_dict(state["optimizer"])


def train(model: nn.Module, optimizer: LocalSGD, seed: int) -> float:
    """A step, with samples of this seed. Returns the loss."""
    x = torch.randn(16, 20, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
    loss.backward()
    optimizer.step()
    return loss.item()


def digest_of(parameters: Iterable[torch.Tensor], optimizer: LocalSGD) -> str:
    """Of what is equal on all peers after an exchange: this rank's part."""
    shared = parameters_to_vector(map(own, optimizer._updates.anchors or parameters))
    return blake2b(shared.detach().numpy().tobytes()).hexdigest()


def main(folder: str, number: str, steps: str, pause: str, state: str | None = None) -> None:
    peer, rank, ranks = int(number), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if ranks > 1:
        dist.init_process_group("gloo")
    model = model_of(0, ranks)
    optimizer = optimizer_of(model, ranks, SharedStore(Path(folder) / "job", peer=peer, peers=4, wait=2.0))
    if state:
        load(model.parameters(), optimizer, torch.load(f"{state}.{rank}", weights_only=True))
    for step in range(int(steps)):
        time.sleep(float(pause))
        loss = train(model, optimizer, 100 * step + 10 * rank + peer)
        said, mine = [None] * ranks, digest_of(model.parameters(), optimizer)
        if ranks > 1:
            dist.all_gather_object(said, mine)
        path = f"{folder}/state{peer}.{rank}"
        parts = [own(one).detach() for one in model.parameters()]
        torch.save({"model": parts, "optimizer": optimizer.state_dict()}, f"{path}.new")
        os.replace(f"{path}.new", path)
        if rank == 0:
            done = optimizer._updates.fragments[0].outer_steps
            print(json.dumps([done, " ".join(filter(None, said)) or mine, loss]), flush=True)
    if ranks > 1:
        dist.destroy_process_group()
