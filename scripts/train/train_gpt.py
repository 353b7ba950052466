"""Trains a small GPT on the source of Python's standard library with AdamW, on every rank of a Horovod job.

    mpirun -np 2 python scripts/train/train_gpt.py --config adamw_small     # updates, compressed
    mpirun -np 2 python scripts/train/train_gpt.py --config recommended  # gradients, compressed
    mpirun -np 2 python scripts/train/train_gpt.py --config none            # dense gradients, for comparison

A config with ``local`` goes to LocalSGD, any other to hvd.DistributedOptimizer. Model, data and batches are those of
gpt_job.py, so the simulation in frontier.py is of this job. The text is that of the Python that runs it. After each
tenth of the steps, OUT/metrics.json is written, with the loss on text that the model has not seen, and the share of its
characters that were predicted: each rank computes a part of it, with its own parameters. With LocalSGD, the learning
rate is multiplied by the root of the number of ranks.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Annotated, Any

import gpt_job
import horovod.torch as hvd
import torch
import typer
import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from wrapping import finish, wrapped

from hvd_deepreduce import Config
from hvd_deepreduce.exchange import traffic
from hvd_deepreduce.torch import LocalSGD

CLIP = 1.0
PARTS = 10
"""Rows of the history."""


class Gpt(nn.Module):
    """The model of gpt_job.py as a module."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(nn.Parameter(part.detach()) for part in gpt_job.views(gpt_job.initial(seed)))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return gpt_job.loss([part.to(dtype) for part in self.tensors], inputs, targets)


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
    hvd.init()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))
    model, job = Gpt(seed), gpt_job.Job(batch_size)
    longer = config != "none" and Config.load(config).local is not None
    peak = lr * hvd.size() ** 0.5 if longer else lr
    plain = torch.optim.AdamW(model.parameters(), peak, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    optimizer, counting = wrapped(model, plain, config, seed)
    local = isinstance(optimizer, LocalSGD)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: gpt_job.rate(step, steps))
    generator = torch.Generator().manual_seed(1000 * seed + 17 + hvd.rank())
    dtype = torch.float32 if float32 else torch.bfloat16
    dense_bytes = traffic.allreduce(4 * gpt_job.NUMEL, hvd.size()).sent
    starts = torch.linspace(0, len(job.held_out) - gpt_job.CONTEXT - 1, windows).long()[hvd.rank() :: hvd.size()]
    history: list[dict[str, Any]] = []
    out.mkdir(parents=True, exist_ok=True)
    terminal = os.environ.get("HVD_DEEPREDUCE_TERMINAL") == "1"
    console = Console(force_terminal=terminal, quiet=hvd.rank() != 0, width=100 if not terminal else None)
    label = "dense" if config == "none" else Path(config).stem
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not terminal or hvd.rank() != 0) as bar:
        task = bar.add_task(label, total=steps)
        done = 0
        for part in range(PARTS):
            begin, waited, losses = time.perf_counter(), 0.0, 0.0
            before = counting.stats()["total"] if counting else {}
            until = steps * (part + 1) // PARTS
            for step in range(done, until):
                optimizer.zero_grad()
                loss = model(*job.batch_of(generator), dtype)
                loss.backward()
                if not local:
                    ready = time.perf_counter()
                    optimizer.synchronize()
                    waited += time.perf_counter() - ready
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                if local:
                    optimizer.step()
                else:
                    with optimizer.skip_synchronize():
                        optimizer.step()
                if step + 1 == steps:
                    finish(optimizer)
                schedule.step()
                losses += loss.item()
                bar.advance(task)
            seconds, count, done = time.perf_counter() - begin, until - done, until
            tensors = list(model.tensors)
            parts = [gpt_job.measured(tensors, *job.windows(job.held_out, some)) for some in starts.split(64)]
            validation, accuracy = hvd.allreduce(torch.stack(parts).mean(0), name="validation").tolist()
            row = {
                "epoch": part + 1,
                "loss": float(hvd.allreduce(torch.tensor(losses / count), name="loss")),
                "validation": validation,
                "accuracy": accuracy,
                "dense_bytes": count * dense_bytes,
                "bytes_sent": count * dense_bytes,
                "encode_seconds": 0.0,
                "wait_seconds": waited,
                "decode_seconds": 0.0,
                "seconds": seconds,
            }
            if counting:
                after = counting.stats()["total"]
                for key in ("bytes_sent", "encode_seconds", "wait_seconds", "decode_seconds"):
                    row[key] = after[key] - before[key]
            history.append(row)
            if hvd.rank() == 0:
                settings = {"steps": steps, "batch_size": batch_size, "lr": lr, "seed": seed, "ranks": hvd.size()}
                used = counting.config.to_dict() if counting else "none"
                (out / "metrics.json").write_text(json.dumps({**settings, "config": used, "epochs_done": history}))
                (out / "config.yaml").write_text(yaml.safe_dump(used, sort_keys=False))
            if not terminal:
                console.print(
                    f"{label}: step {done:5}/{steps}  loss {row['loss']:.4f}  validation {row['validation']:.4f}  "
                    f"accuracy {row['accuracy']:.2%}  "
                    f"sent {row['bytes_sent'] / max(1, row['dense_bytes']):.3%} of dense  {seconds:.1f} s"
                )
    hvd.shutdown()


if __name__ == "__main__":
    typer.run(main)
