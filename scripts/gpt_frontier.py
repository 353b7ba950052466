"""Loss against bytes of a small GPT under AdamW: dense, compressed gradients, compressed updates."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import math
import numpy as np
import torch
from gpt_job import NUMEL, SIZES, Job, initial
from simulated_ranks import SimulatedRanks

from hvd_deepreduce import Config

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "runs" / "gpt_frontier.jsonl"


@dataclass(frozen=True)
class Settings:
    kind: str = "updates"
    workers: int = 2
    steps: int = 2000
    seed: int = 0
    lr: float = 2e-3
    config: dict[str, Any] | None = None
    every: list[list[float]] = field(default_factory=lambda: [[1.0, 8]])
    outer_lr: float = 1.0
    momentum: float = 0.0
    decay: float = 1.0
    beta2: float = 0.99
    weight_decay: float = 0.1
    batch: int = 4
    warm: int = 0
    extra: dict[str, Any] = field(default_factory=dict)


def rate(step: int, steps: int) -> float:
    warm = steps // 20
    return (step + 1) / warm if step < warm else 0.5 + 0.5 * math.cos(math.pi * (step - warm) / (steps - warm))


class Updates:
    def __init__(self, s: Settings, start: torch.Tensor) -> None:
        self.s = s
        self.anchor = torch.nn.Parameter(start.clone())
        self.outer = torch.optim.SGD([self.anchor], lr=s.outer_lr, momentum=s.momentum, nesterov=s.momentum > 0)
        self.ranks = SimulatedRanks(Config.load(s.config), s.workers, SIZES) if s.config else None
        self.bytes = 0.0
        self.last = 0

    def period(self, step: int) -> int:
        for until, every in self.s.every:
            if step < until * self.s.steps:
                return int(every)
        return int(self.s.every[-1][1])

    def due(self, step: int) -> bool:
        return step + 1 - self.last >= self.period(step) or step + 1 == self.s.steps

    @torch.no_grad()
    def sync(self, local: torch.Tensor, step: int) -> None:
        s = self.s
        self.last = step + 1
        for g in self.outer.param_groups:
            if "momentum_until" in s.extra and step >= s.extra["momentum_until"] * s.steps:
                g["momentum"], g["nesterov"] = 0.0, False
        deltas = self.anchor - local
        if self.ranks is None:
            mean = deltas.mean(0)
            self.bytes += dense_bytes(s.workers)
        else:
            mean = torch.from_numpy(self.ranks.mean([d.numpy() for d in deltas], s.decay))
        self.anchor.grad = mean
        self.outer.step()
        local.copy_(self.anchor)

    def sent(self) -> float:
        return self.bytes + (max(self.ranks.sent) if self.ranks else 0)

    def flushed(self) -> torch.Tensor:
        a = self.anchor.detach()
        if self.ranks is None:
            return a
        return a - torch.from_numpy(np.mean(self.ranks.residuals, 0))


def dense_bytes(workers: int) -> float:
    return 2 * (workers - 1) / workers * 4 * NUMEL


def run(s: Settings, job: Job) -> dict[str, Any]:
    began = time.process_time()
    torch.manual_seed(s.seed)
    start = initial(s.seed)
    dense = s.kind != "updates"
    rows = 1 if dense else s.workers
    local = torch.nn.Parameter(start.repeat(rows, 1))
    local.grad = torch.zeros_like(local)
    adam = torch.optim.AdamW([local], lr=s.lr, betas=(0.9, s.beta2), weight_decay=s.weight_decay, fused=True)
    generators = [torch.Generator().manual_seed(1000 * s.seed + 17 + w) for w in range(s.workers)]
    grads = torch.zeros(s.workers, NUMEL)
    updates = Updates(s, start) if s.kind == "updates" else None
    gradients = SimulatedRanks(Config.load(s.config), s.workers, SIZES) if s.kind == "gradients" else None
    sent, curve = 0.0, []
    train = 0.0
    for step in range(s.steps):
        for g in adam.param_groups:
            g["lr"] = s.lr * rate(step, s.steps)
        losses = [job.gradient(local.detach()[min(w, rows - 1)], generators[w], grads[w]) for w in range(s.workers)]
        train = sum(losses) / s.workers
        curve.append(train)
        if gradients is not None:
            local.grad[0] = torch.from_numpy(gradients.mean([g.numpy() for g in grads], s.decay))
        elif dense:
            local.grad[0] = grads.mean(0)
            sent += dense_bytes(s.workers)
        elif step < s.warm:
            local.grad[:] = grads.mean(0)
            sent += dense_bytes(s.workers)
        else:
            local.grad.copy_(grads)
        norms = local.grad.norm(dim=1, keepdim=True)
        local.grad.mul_((1.0 / norms).clamp(max=1.0))
        adam.step()
        if updates is not None:
            if step < s.warm:
                updates.last = step + 1
                if step + 1 == s.warm:
                    updates.anchor.data.copy_(local.data[0])
            elif updates.due(step):
                updates.sync(local.data, step)
    if gradients is not None:
        sent += max(gradients.sent)
    if updates is not None:
        sent += updates.sent()
    out = {
        **asdict(s),
        "loss": round(job.validate(updates.anchor.detach() if updates else local.data[0]), 5),
        "share": round(sent / dense_bytes(s.workers) / s.steps, 6),
        "train": round(float(np.mean(curve[-100:])), 4),
        "mid": [round(float(np.mean(curve[i : i + 100])), 4) for i in range(0, s.steps, 200)],
        "cpu": round(time.process_time() - began, 1),
    }
    if updates is not None and updates.ranks is not None:
        out["flushed"] = round(job.validate(updates.flushed()), 5)
    return out
