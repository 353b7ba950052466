"""One run of a job: all workers in one process, in each step by a scheme (schemes.py), or by local steps and updates.

A run is told by plain settings, which are all that it depends on, with a seed and a number of steps:

- ``optimizer``: ``adamw``, ``muon``, ``sgd`` or ``sign`` (the sign of the direction); ``lr``, the peak of a warm-up and
  a cosine; ``weight_decay``, decoupled; ``momentum``; ``beta1``, ``beta2``; ``clip``, the largest norm of a gradient.
- ``scheme``: a name of ``schemes.SCHEMES``, with its arguments in ``with``; or
- ``every``: local steps from one exchange to the next, ``outer_lr`` and ``outer_momentum`` of the outer step, ``decay``
  of the residual, and ``config`` of the containers; None: updates are averaged in float32. ``fragments`` of the model
  are exchanged in turn, and their means applied ``delay`` local steps later.

Workers of local updates clip their own gradients; otherwise ``clip_first`` says whether a worker's gradient is clipped
before the scheme gets it, or the direction after it.
"""

import math
import time
from collections.abc import Sequence
from typing import Any

import gpt_job
import images
import lstm_job
import muon
import numpy as np
import torch
from local_updates import InTurn, LocalUpdates, Outer
from schemes import SCHEMES
from simulated_ranks import DenseRanks, SimulatedRanks

from hvd_deepreduce import Config
from hvd_deepreduce.engine.fragments import divided
from hvd_deepreduce.exchange import traffic
from hvd_deepreduce.torch import SignMomentum

Settings = dict[str, Any]
JOBS: dict[str, Any] = {"gpt": gpt_job.SMALL, "gpt-large": gpt_job.LARGE, "lstm": lstm_job, **images.MODELS}
BATCH = 4
"""Sequences of a worker and step, of the language models."""


def optimizer_of(settings: Settings, models: torch.nn.Parameter, shapes: Sequence[Sequence[int]]) -> Any:
    """The optimizer of all workers' models, ``[rows, numel]``."""
    name, lr, decay = settings["optimizer"], settings["lr"], settings.get("weight_decay", 0.0)
    if name == "adamw":
        betas = (settings.get("beta1", 0.9), settings.get("beta2", 0.99))
        return torch.optim.AdamW([models], lr, betas=betas, weight_decay=decay, fused=True)
    if name == "sgd":
        return torch.optim.SGD([models], lr, momentum=settings.get("momentum", 0.0), weight_decay=decay)
    if name == "muon":
        parts = muon.separated(shapes)
        return muon.Muon(models, parts, lr, settings.get("momentum", 0.95), decay, settings.get("beta2", 0.99))
    return SignMomentum([models], lr, decay)


def train(job: str, settings: Settings, workers: int, steps: int, seed: int) -> dict[str, Any]:
    """Trains, and returns what a line of the file has beside the settings; ``early`` is after a fifth of the steps."""
    torch.set_num_threads(1)
    began = time.process_time()
    model = JOBS[job]
    data, start = model.Job(BATCH), model.initial(seed)
    local = "every" in settings
    replicas = np.tile(start.numpy(), (workers if local else 1, 1))
    updates = _updates(settings, replicas, model.SIZES) if local else None
    scheme = None if local else SCHEMES[settings["scheme"]](workers, model.SHAPES, steps, **settings.get("with", {}))
    models = torch.nn.Parameter(torch.from_numpy(replicas))
    optimizer = optimizer_of(settings, models, model.SHAPES)
    generators = [torch.Generator().manual_seed(1000 * seed + 17 + worker) for worker in range(workers)]
    gradients, clip = torch.zeros(workers, model.NUMEL), settings.get("clip", math.inf)
    early: dict[str, Any] = {}
    for step in range(steps):
        flat = models.detach()
        if settings.get("scheme") == "dense" and data.together:
            data.gradient(flat[0], generators, gradients[0])
            gradients[1:] = gradients[0]
        else:
            for worker, generator in enumerate(generators):
                data.gradient(flat[worker if local else 0], [generator], gradients[worker])
        first = local or settings.get("clip_first", False)
        used = gpt_job.clipped(gradients, clip) if first else gradients
        if scheme:
            used = scheme.combine(used)[None]
        models.grad = used if first else gpt_job.clipped(used, clip)
        optimizer.param_groups[0]["lr"] = settings["lr"] * gpt_job.rate(step, steps)
        optimizer.step()
        if updates:
            updates.step(last=step + 1 == steps)
        if isinstance(data, images.ImageJob) and step + 1 == steps // 5:
            early = {"early": dict(zip(("loss", "accuracy"), data.validate(models.detach()[0]), strict=True))}
    loss, accuracy = data.validate(models.detach()[0])
    senders = [one.job for one in updates.fragments] if updates else [scheme]
    rounds = updates.exchanged / model.NUMEL if updates else steps
    sent = float(np.max(sum(np.array(one.sent) for one in senders)))
    dense = traffic.allreduce(4 * model.NUMEL, workers).sent * steps
    return {
        "loss": loss if math.isfinite(loss) else None, "accuracy": accuracy, "sent": round(sent),
        "rounds": round(rounds), "share": sent / dense, "volume": _volume(senders, model.NUMEL * workers * rounds),
        "seconds": round(time.process_time() - began, 1), **early,
    }  # fmt: skip


def _updates(settings: Settings, replicas: np.ndarray, sizes: Sequence[int]) -> InTurn:
    """Of the workers' models ``[workers, numel]``, which it changes."""
    groups = divided(sizes, settings.get("fragments", 1))
    config = None if settings.get("config") is None else Config.load(settings["config"])
    fragments, end = [], 0
    for parts in ([sizes[number] for number in group] for group in groups):
        begin, end = end, end + sum(parts)
        workers, own = len(replicas), replicas[:, begin:end]
        dense = config is None or config.sends_all_as_it_is
        ranks = DenseRanks(workers) if dense else SimulatedRanks(config, workers, parts)
        outer = Outer(settings.get("outer_lr", 1.0), settings.get("outer_momentum", 0.0))
        fragments.append(LocalUpdates(ranks, own[0], settings.get("decay", 1.0), outer, own))
    return InTurn(fragments, settings["every"], settings.get("delay", 0))


def _volume(senders: Sequence[Any], exchanged: float) -> float | None:
    """Bytes of containers relative to float32 of all workers' elements; None: no containers."""
    totals = [getattr(one, "container_bytes", None) for one in senders]
    return None if None in totals else sum(totals) / (4 * exchanged)  # type: ignore[arg-type]
