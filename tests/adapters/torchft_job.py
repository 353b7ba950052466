"""A replica of test_torchft.py: trains under a Manager of torchft, and writes a line after each step.

One rank trains with LocalSGD; two share the model by FSDP, and train with PeerOptimizer. TORCHFT_LIGHTHOUSE is the
lighthouse's address. It ends after the manager's step whose number is in the file ``folder``/end.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torchft import Manager, ProcessGroupGloo

from hvd_deepreduce.torch.tensors import own
from hvd_deepreduce.torch.torchft import ManagedQuorum
from tests.adapters import peers_job


def main(folder: str, number: str) -> None:
    peer, rank, ranks = int(number), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    model = peers_job.model_of(peer, ranks)  # a Manager begins with the parameters of one of them
    parameters = list(model.parameters())  # torchft asks during a forward pass, in which FSDP has others

    def load(state):
        peers_job.load(parameters, optimizer, state)

    def told():
        return {"model": [own(one).detach().clone() for one in parameters], "optimizer": optimizer.state_dict()}

    group, seconds = ProcessGroupGloo(timeout=timedelta(seconds=5)), timedelta(seconds=20)
    manager = Manager(
        group, load, told, min_replica_size=1, replica_id=f"replica{peer}", timeout=seconds, quorum_timeout=seconds,
        connect_timeout=seconds, hostname="localhost",
    )  # fmt: skip
    optimizer = peers_job.optimizer_of(model, ranks, ManagedQuorum(manager, group, peer=peer, peers=3))
    end = Path(folder, "end")
    while not end.exists() or manager.current_step() < int(end.read_text()):
        time.sleep(0.1)
        loss = peers_job.train(model, optimizer, 100 * manager.current_step() + 10 * rank + peer)
        line = {
            "exchanges": optimizer._updates.fragments[0].outer_steps, "step": manager.current_step(), "rank": rank,
            "shared": peers_job.digest_of(parameters, optimizer), "loss": loss, "there": manager.num_participants(),
        }  # fmt: skip
        with Path(folder, f"log{peer}.{rank}.{os.getpid()}").open("a") as file:
            file.write(json.dumps(line) + "\n")
    manager.shutdown(wait=False)
    os._exit(0)  # threads of a process group that was replaced may wait for ranks that have died
