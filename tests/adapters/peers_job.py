"""A peer of test_peers.py: trains, writes a line after each step, and a checkpoint after each exchange.

python tests/adapters/peers_job.py FOLDER PEER STEPS PAUSE [STATE]
"""

from __future__ import annotations

import json
import os
import sys
import time
from hashlib import blake2b
from pathlib import Path

import torch
from torch import nn

from hvd_deepreduce.exchange.store import SharedStore
from hvd_deepreduce.torch import LocalSGD
from tests.adapters.common import LOSSY


def main(folder: str, number: str, steps: str, pause: str, state: str | None = None) -> None:
    peer = int(number)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 4))
    store = SharedStore(Path(folder) / "job", peer=peer, peers=4, wait=2.0)
    config = {**LOSSY, "scope": "model", "value": "qsgd", "local": {"every": 2, "momentum": 0.5}}
    optimizer = LocalSGD(torch.optim.AdamW(model.parameters(), lr=0.01), model, config, store=store)
    if state:
        kept = torch.load(state, weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
    updates = optimizer._updates
    for step in range(int(steps)):
        time.sleep(float(pause))
        x = torch.randn(16, 20, generator=torch.Generator().manual_seed(100 * step + peer))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
        loss.backward()
        optimizer.step()
        anchors = b"".join(one.numpy().tobytes() for one in updates.anchors)
        done = updates.fragments[0].outer_steps
        print(json.dumps([done, blake2b(anchors).hexdigest(), loss.item()]), flush=True)
        path = Path(folder) / f"state{peer}"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{path}.new")
        os.replace(f"{path}.new", path)


if __name__ == "__main__":
    main(*sys.argv[1:])
