"""Trains a small GPT on the source of Python's standard library with AdamW, on every rank of a Horovod job.

    mpirun -np 2 python scripts/train/train_gpt.py --config adamw_small     # updates, compressed
    mpirun -np 2 python scripts/train/train_gpt.py --config recommended     # gradients, compressed
    mpirun -np 2 python scripts/train/train_gpt.py --config none            # dense gradients, for comparison

A config with ``local`` goes to LocalSGD, with the learning rate times the root of the number of ranks. Model, data and
batches are those of gpt_job.py, so the simulation in the arena is of this job. After each tenth of the steps,
OUT/metrics.json is written, with the loss on text that the model has not seen, and the share of its characters that
were predicted: each rank computes a part of it, with its own parameters.
"""

import os
import time
from pathlib import Path
from typing import Annotated

import gpt_job
import torch
import typer
from gpt_job import SMALL
from history import History
from launchers import HorovodJob, finish
from torch import nn

from hvd_deepreduce import Config

CLIP = 1.0
PARTS = 10
"""Rows of the history."""


class Gpt(nn.Module):
    """The model of gpt_job.py as a module."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(nn.Parameter(part.detach()) for part in SMALL.views(SMALL.initial(seed)))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return SMALL.loss([part.to(dtype) for part in self.tensors], inputs, targets)


def main(
    config: Annotated[str, typer.Option(help="a preset, a YAML file, or none for dense")] = "none",
    steps: Annotated[int, typer.Option(min=PARTS)] = 2000,
    batch_size: Annotated[int, typer.Option(min=1, help="sequences of 64 characters per rank and step")] = 4,
    lr: Annotated[float, typer.Option(help="the largest learning rate of AdamW, for dense gradients")] = 2.5e-3,
    seed: int = 0,
    float32: Annotated[bool, typer.Option("--float32", help="compute in float32, not in bfloat16")] = False,
    windows: Annotated[int, typer.Option(min=2, help="sequences of the text for validation that are used")] = 1024,
    out: Annotated[Path, typer.Option(help="folder for metrics.json and config.yaml")] = Path("runs/train_gpt"),
) -> None:
    """Trains, and writes OUT/metrics.json and OUT/config.yaml."""
    job = HorovodJob()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // job.local_size))
    model, text = Gpt(seed), gpt_job.Job(batch_size)
    longer = config != "none" and Config.load(config).local is not None
    peak = lr * job.size**0.5 if longer else lr
    plain = torch.optim.AdamW(model.parameters(), peak, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    optimizer, counting = job.distribute_any(model, plain, config, seed)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: gpt_job.rate(step, steps))
    generator = torch.Generator().manual_seed(1000 * seed + 17 + job.rank)
    dtype = torch.float32 if float32 else torch.bfloat16
    starts = torch.linspace(0, len(text.held_out) - gpt_job.CONTEXT - 1, windows).long()[job.rank :: job.size]
    settings = {"steps": steps, "batch_size": batch_size, "lr": lr, "seed": seed, "ranks": job.size}
    history = History(out, config, counting, job.rank, settings, SMALL.NUMEL)
    bar, task = history.progress(steps)
    with bar:
        done = 0
        for part in range(PARTS):
            begin, waited, losses, before = time.perf_counter(), 0.0, 0.0, history.total()
            until = steps * (part + 1) // PARTS
            for step in range(done, until):
                optimizer.zero_grad()
                loss = model(*text.batch_of(generator), dtype)
                loss.backward()
                ready = time.perf_counter()
                waited += job.step(optimizer, lambda: nn.utils.clip_grad_norm_(model.parameters(), CLIP)) - ready
                if step + 1 == steps:
                    finish(optimizer)
                schedule.step()
                losses += loss.item()
                bar.advance(task)
            seconds, count, done = time.perf_counter() - begin, until - done, until
            batches = [text.windows(text.held_out, some) for some in starts.split(64)]
            with torch.no_grad():
                parts = [gpt_job.measured(text.scores(list(model.tensors), x), y) for x, y in batches]
            validation, accuracy = job.gather(torch.stack(parts).mean(0), "validation").mean(0).tolist()
            mean = float(job.gather(torch.tensor(losses / count), "loss").mean())
            history.add(before, count, seconds, waited, loss=mean, validation=validation, accuracy=accuracy)
            said = "validation {validation:.4f}  accuracy {accuracy:.2%}"
            history.write(f"step {done:5}/{steps}", said)
    job.end()


if __name__ == "__main__":
    typer.run(main)
