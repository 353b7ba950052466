"""Loss against bytes of a small GPT under AdamW: dense, compressed gradients, compressed updates; docs/accuracy.md.

    python scripts/gpt_frontier.py --quick                      # a few minutes
    python scripts/gpt_frontier.py --processes 2 --write        # all methods, 2 and 4 workers, 3 seeds

All workers of a job run in one process, and exchange real containers (simulated_ranks.py). A run is a line of
runs/gpt_frontier.jsonl; runs that are there already are not repeated, so a list can be stopped and continued.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

import doc_sections
import frontier
import torch
import typer
from frontier import Run, signs
from gpt_job import CONTEXT, NUMEL, SIZES, Job, initial, rate, validate
from local_updates import LocalUpdates, Outer
from simulated_ranks import DenseRanks, SimulatedRanks

from hvd_deepreduce import Config
from hvd_deepreduce.exchange import traffic

ROOT = Path(__file__).resolve().parent.parent
DOC = ROOT / "docs" / "accuracy.md"
FIGURE = ROOT / "docs" / "figures" / "gpt_frontier.png"
RUNS = ROOT / "runs" / "gpt_frontier.jsonl"
HEAD = "# Accuracy\n\nWhat training loses by compression, by job and optimizer.\n"
BATCH = 4
LEARNING_RATES = {2: 2.5e-3, 4: 4e-3}
"""Dense's best, by the number of workers; for other numbers, that of the next lower one."""


@dataclass(frozen=True)
class Method:
    """How the workers of a job combine what they learn.

    Attributes:
        words: for the table.
        sends: ``dense``: the mean of all gradients, every step. ``gradients``: compressed, with error feedback.
            ``updates``: each worker steps by its own gradients; every ``every`` steps, the difference to the common
            anchor is sent, with error feedback.
        config: of the containers; None: updates are averaged in float32.
        every: steps from one synchronisation to the next, H.
        outer_lr, momentum: of the outer SGD, whose gradient is the mean of the decoded updates; Nesterov momentum.
        decay: factor of the residual before each synchronisation.
        lr: factor of the learning rate that is best for dense.
        longer: the learning rate is also multiplied by the root of the number of workers. AdamW divides by the root of
            the second moment, which noise makes larger, by up to this number, in a worker's gradient than in the mean.
    """

    words: str
    sends: Literal["dense", "gradients", "updates"] = "updates"
    config: dict[str, Any] | str | None = None
    every: int = 1
    outer_lr: float = 1.0
    momentum: float = 0.0
    decay: float = 1.0
    lr: float = 1.0
    longer: bool = False

    def rate(self, workers: int) -> float:
        """The largest learning rate."""
        return learning_rate(workers) * self.lr * (workers**0.5 if self.longer else 1.0)


METHODS = {
    "dense": Method("dense gradients, every step", "dense"),
    "dense_slow": Method("dense, learning rate x 0.625", "dense", lr=0.625),
    "dense_fast": Method("dense, learning rate x 1.5", "dense", lr=1.5),
    "gradients": Method("gradients, preset `topk_model`: top 1%, 7 bits", "gradients", "topk_model"),
    "averaged": Method("updates in float32, H = 4", every=4, longer=True),
    "diloco": Method(
        "DiLoCo: updates in float32, H = 16, outer rate 0.7, momentum 0.9", every=16, outer_lr=0.7, momentum=0.9
    ),
    "sparseloco": Method(
        "SparseLoCo: H = 15, top 64 of 4,096, 2 bits, decay 0.95", config="sparseloco", every=15, decay=0.95
    ),
    "momentum": Method("updates, H = 8, signs of the top 10%, momentum 0.4", config=signs(0.1), every=8, momentum=0.4),
    "adamw_safe": Method(
        "**adamw_safe**: updates, H = 4, signs of the top 4.5%", config="adamw_safe", every=4, longer=True
    ),
    "adamw_small": Method(
        "**adamw_small**: updates, H = 4, signs of the top 1.5%", config="adamw_small", every=4, longer=True
    ),
    "tiny": Method("updates, H = 8, signs of the top 0.55%", config=signs(0.0055), every=8, lr=1.5),
}
MORE_SEEDS = {"dense", "adamw_safe", "adamw_small"}
"""Methods with as many seeds as are asked for; of the others there is one."""


def learning_rate(workers: int) -> float:
    """The learning rate that is best for dense."""
    return LEARNING_RATES[max(known for known in LEARNING_RATES if known <= workers)]


def train(name: str, workers: int, steps: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Run:
    """One run: AdamW with betas of 0.9 and 0.99 and weight decay 0.1, gradients clipped to a norm of 1."""
    torch.set_num_threads(1)
    began = time.process_time()
    job, method = Job(BATCH, dtype), METHODS[name]
    start = initial(seed)
    alone = method.sends == "updates"
    local = torch.nn.Parameter(start.repeat(workers if alone else 1, 1))
    lr = method.rate(workers)
    inner = torch.optim.AdamW([local], lr=lr, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    ranks = SimulatedRanks(Config.load(method.config), workers, SIZES) if method.config else DenseRanks(workers)
    updates = LocalUpdates(ranks, start.numpy(), method.decay, Outer(method.outer_lr, method.momentum))
    if alone:
        local.data = torch.from_numpy(updates.local)
    generators = [torch.Generator().manual_seed(1000 * seed + 17 + worker) for worker in range(workers)]
    gradients = torch.zeros(1 if method.sends == "dense" else workers, NUMEL)
    dense = traffic.allreduce(4 * NUMEL, workers).sent * steps
    for step in range(steps):
        if method.sends == "dense":
            job.gradient(local.detach()[0], generators, gradients[0])
        else:
            for worker, generator in enumerate(generators):
                job.gradient(local.detach()[worker if alone else 0], [generator], gradients[worker])
        if method.sends == "gradients":
            local.grad = torch.from_numpy(ranks.mean([gradient.numpy() for gradient in gradients]))[None]
        else:
            local.grad = gradients
        local.grad *= (1.0 / local.grad.norm(dim=1, keepdim=True)).clamp(max=1.0)
        inner.param_groups[0]["lr"] = lr * rate(step, steps)
        inner.step()
        if alone and ((step + 1) % method.every == 0 or step + 1 == steps):
            updates.synchronise()
    sent = dense if method.sends == "dense" else max(ranks.sent)
    value, accuracy = validate(job, local.detach()[0])
    return {
        "name": name, "workers": workers, "steps": steps, "seed": seed, "rate": lr, "settings": asdict(method),
        "loss": value, "accuracy": accuracy, "share": sent / dense,
        "seconds": round(time.process_time() - began, 1),
    }  # fmt: skip


def load(path: Path) -> list[Run]:
    """The runs of a file that have the settings and learning rates of today."""
    return frontier.load(path, METHODS)


TEXT = """\
A GPT of {numel:,} parameters on the source of Python's standard library, characters, context {context}, {batch}
sequences a worker and step, {steps:,} steps of AdamW (betas 0.9 and 0.99, weight decay 0.1, gradients clipped to a norm
of 1, warm-up and cosine to 0). The learning rate is dense's best of those that were tried: {lr}. All workers run in one
process and exchange real containers; `bytes / dense` is what a worker sends, relative to a dense float32 ring allreduce
in every step. The gap is to dense with the same seed and as many workers; in brackets, the least and the greatest of
the seeds. H is the number of steps from one synchronisation to the next. The dashed line in the picture is the aim:
within 0.03 nats, at 0.5% of the bytes.

![loss against bytes](figures/gpt_frontier.png)

{table}

These are losses and bytes, not times, and one small model: for yours, compare with dense before you rely on them.

*{today}, scripts/gpt_frontier.py.*"""


def main(
    quick: Annotated[bool, typer.Option(help="a few minutes: 300 steps, 2 workers, 1 seed, four methods")] = False,
    steps: Annotated[int, typer.Option(min=20, help="of the inner optimizer")] = 2000,
    seeds: Annotated[int, typer.Option(min=1, help="runs of each method")] = 3,
    workers: Annotated[list[int], typer.Option(min=2, help="numbers of workers; repeat for more")] = [2, 4],  # noqa: B006
    only: Annotated[list[str], typer.Option(help="methods to run; repeat for more")] = [],  # noqa: B006
    processes: Annotated[int, typer.Option(min=1, help="runs at a time, each on one thread")] = 1,
    runs: Annotated[Path, typer.Option(help="file of the runs, which is continued")] = RUNS,
    draw: Annotated[bool, typer.Option(help="train nothing: only the runs that the file has")] = False,
    write: Annotated[bool, typer.Option(help="write docs/accuracy.md and its picture")] = False,
) -> None:
    """Trains by each method, and prints loss against bytes."""
    if quick:
        steps, seeds, workers, only = 300, 1, [2], ["dense", "gradients", "adamw_safe", "adamw_small"]
    if unknown := set(only) - set(METHODS):
        raise typer.BadParameter(f"no method is named {', '.join(unknown)}; the methods are: {', '.join(METHODS)}")
    wanted = [
        (name, count, steps, seed)
        for seed in range(seeds)
        for count in workers
        for name in only or METHODS
        if not seed or name in MORE_SEEDS
    ]
    found_runs = frontier.run_missing(train, METHODS, [] if draw else wanted, runs, processes)
    words = {name: method.words for name, method in METHODS.items()}
    found = frontier.rows(found_runs, words, steps)
    text = frontier.table(found, words)
    print(text)
    if write:
        shown = [row for row in found if row["name"] not in ("dense_slow", "dense_fast")]
        title = f"A GPT of {NUMEL / 1e6:.2f} M parameters, AdamW, {steps:,} steps"
        frontier.picture(shown, words, 0.03, title, FIGURE)
        rates = ", ".join(f"{lr:g} with {count} workers" for count, lr in LEARNING_RATES.items())
        body = TEXT.format(
            numel=NUMEL, context=CONTEXT, batch=BATCH, steps=steps, lr=rates, table=text, today=date.today()
        )
        doc_sections.write(DOC, "gpt", "A small GPT under AdamW", body, HEAD)


if __name__ == "__main__":
    typer.run(main)
