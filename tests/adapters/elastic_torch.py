"""An elastic job of test_elastic.py: a third rank joins, and is killed later.

There are three models, one with each scope. The DeepReduce of a fourth model is not in the state; it is used until the
rank is killed. Its first gradients are sent as they are, and all of them in some steps. A fifth model is trained by
LocalSGD, which must be in the state.
"""

import faulthandler
import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import nn

from hvd_deepreduce.torch import DeepReduce, LocalSGD
from tests.adapters.elastic import THREE, digest, note, set_hosts
from tests.adapters.scopes import SCOPES

FOLDER = Path(sys.argv[1])
ALL = [{"min_elements": 0}, *SCOPES[:2], {"min_elements": 100, "mode": "auto"}]

faulthandler.dump_traceback_later(240, exit=True)
hvd.init()
torch.manual_seed(os.getpid())  # ranks begin with different weights, until the state is synchronized
models = nn.ModuleList(nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 5)) for _ in range(5))
compressions, optimizers = [], []
for number, (model, scope) in enumerate(zip(models[:4], ALL, strict=True)):
    pairs = [(f"{number}.{name}", parameter) for name, parameter in model.named_parameters()]
    compressions.append(DeepReduce(pairs, scope))
    optimizers.append(hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), pairs, compressions[-1]))
kept = {f"compression{i}": one for i, one in enumerate(compressions[:3])}
local = LocalSGD(torch.optim.AdamW(models[4].parameters(), 0.01), models[4], SCOPES[0], every=2)
state = hvd.elastic.TorchState(
    model=models, step=0, phase="two", local=local, **kept, **{f"optimizer{i}": one for i, one in enumerate(optimizers)}
)


def facts():
    states = [one.state_dict() for one in compressions]
    residuals = [digest({"residuals": {n: r.numpy() for n, r in one["residuals"].items()}}) for one in states]
    steps = [sorted(set(one["steps"].values())) for one in states]
    weights = torch.cat([p.detach().reshape(-1) for p in models.parameters()]).numpy().tobytes()
    alone = local.state_dict()["local_sgd"]
    kept_alone = {name: residual.numpy() for name, residual in alone["compression"]["residuals"].items()}
    clock = [alone["clock"], digest({"residuals": kept_alone})]
    densities = [one.config.sparsifier.density for one in compressions]
    return {
        "step": state.step, "steps": steps, "residuals": residuals, "densities": densities,
        "local": clock, "weights": hashlib.sha256(weights).hexdigest()[:16],
    }  # fmt: skip


def take_step():
    torch.manual_seed(1000 * state.step + hvd.rank())
    for model, optimizer in zip(models, [*optimizers, local], strict=True):
        if model is models[3] and state.phase != "two" and hvd.size() == 2:
            continue
        optimizer.zero_grad()
        model(torch.randn(8, 40)).square().mean().backward()
        if state.phase == "three" and state.step >= 4 and hvd.rank() == 2 and model is models[1]:
            os.kill(os.getpid(), signal.SIGKILL)  # the others have encoded gradients that are never reduced
        optimizer.step()
    state.step += 1


@hvd.elastic.run
def train(state):
    note(FOLDER, event="enters", rank=hvd.rank(), size=hvd.size(), phase=state.phase, **facts())
    if not state.step:
        forgotten = nn.Linear(3, 2)
        try:
            LocalSGD(torch.optim.SGD(forgotten.parameters(), 0.1), forgotten, every=1).step()
        except RuntimeError as error:
            note(FOLDER, event="refused", said=str(error))
    for _ in range(10_000):
        take_step()
        if state.phase == "two" and state.step == 2:
            for one in kept.values():
                one.set_config(sparsifier={"name": "topk", "density": 0.05})
            if hvd.rank() == 0:
                set_hosts(FOLDER, THREE)
        if state.phase == "two" and hvd.size() == 3:
            state.phase = "three"
        if state.phase == "three" and hvd.size() == 2:
            state.phase = "killed"
            state.last = state.step + 2
        if state.phase == "killed" and state.step == state.last:
            break
        if state.phase == "two":
            time.sleep(0.05)  # until the third rank is there
        local.sync()
        note(FOLDER, event="commits", rank=hvd.rank(), size=hvd.size(), **facts())
        state.commit()
    local.sync()
    note(FOLDER, event="ends", rank=hvd.rank(), size=hvd.size(), **facts())


train(state)
