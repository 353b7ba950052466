"""A replica of test_torchft.py: trains under a Manager of torchft, and writes a line after each step.

One rank trains with LocalSGD; two share the model by FSDP, and train with PeerOptimizer. TORCHFT_LIGHTHOUSE is the
lighthouse's address. It ends after the manager's step whose number is in the file ``folder``/end.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parameters_to_vector
from torchft import Manager, ProcessGroupGloo

from hvd_deepreduce.torch import LocalSGD, PeerOptimizer, SignMomentum
from hvd_deepreduce.torch.tensors import own
from hvd_deepreduce.torch.torchft import ManagedQuorum
from tests.adapters.common import LOSSY


def main(folder: str, number: str) -> None:
    peer, rank, ranks = int(number), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(peer)  # a Manager begins with the parameters of one of them
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 4))
    dist.init_process_group("gloo")
    if ranks > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))

    parameters = list(model.parameters())  # torchft asks during a forward pass, in which FSDP has others

    def load(state):
        with torch.no_grad():
            for one, values in zip(parameters, state["model"], strict=True):
                own(one).copy_(values)
        optimizer.load_state_dict(state["optimizer"])

    def told():
        return {"model": [own(one).detach().clone() for one in parameters], "optimizer": optimizer.state_dict()}

    group, seconds = ProcessGroupGloo(timeout=timedelta(seconds=5)), timedelta(seconds=20)
    manager = Manager(
        group, load, told, min_replica_size=1, replica_id=f"replica{peer}", timeout=seconds, quorum_timeout=seconds,
        connect_timeout=seconds, hostname="localhost",
    )  # fmt: skip
    store = ManagedQuorum(manager, group, peer=peer, peers=3)
    if ranks == 1:
        config = {**LOSSY, "scope": "model", "value": "qsgd", "local": {"every": 2, "momentum": 0.5}}
        optimizer = LocalSGD(torch.optim.AdamW(model.parameters(), lr=0.01), model, config, store=store)
    else:
        inner = SignMomentum(model.parameters(), 0.01)
        slower = torch.optim.lr_scheduler.StepLR(inner, 10, 0.7)
        optimizer = PeerOptimizer(inner, model, "sign_momentum", store=store, scheduler=slower)
    updates = optimizer._updates
    end = Path(folder, "end")
    while not end.exists() or manager.current_step() < int(end.read_text()):
        time.sleep(0.1)
        seed = 100 * manager.current_step() + 10 * rank + peer
        x = torch.randn(16, 20, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
        loss.backward()
        optimizer.step()
        shared = parameters_to_vector(map(own, updates.anchors or parameters)).detach()
        digest = blake2b(shared.numpy().tobytes()).hexdigest()
        line = {
            "exchanges": updates.fragments[0].outer_steps, "step": manager.current_step(), "rank": rank,
            "shared": digest, "loss": loss.item(), "there": manager.num_participants(),
        }  # fmt: skip
        with Path(folder, f"log{peer}.{rank}.{os.getpid()}").open("a") as file:
            file.write(json.dumps(line) + "\n")
    manager.shutdown(wait=False)
    os._exit(0)  # threads of a process group that was replaced may wait for ranks that have died
