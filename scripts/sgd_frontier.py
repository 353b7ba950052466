"""Loss against bytes of a small LSTM under SGD with momentum: dense, gradients, DGC, updates; docs/accuracy.md.

    python scripts/sgd_frontier.py --quick                      # a few minutes
    python scripts/sgd_frontier.py --processes 2 --write        # all methods, 2 and 4 workers, 3 seeds

All workers of a job run in one process, and exchange real containers (simulated_ranks.py). A run is a line of
runs/sgd_frontier.jsonl; runs that are there already are not repeated, so a list can be stopped and continued.
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
from gpt_job import CONTEXT, rate
from local_updates import LocalUpdates, Outer
from lstm_job import HIDDEN, NUMEL, SIZES, Job, initial
from simulated_ranks import DenseRanks, SimulatedRanks

from hvd_deepreduce import Config
from hvd_deepreduce.exchange import traffic

ROOT = Path(__file__).resolve().parent.parent
DOC = ROOT / "docs" / "accuracy.md"
FIGURE = ROOT / "docs" / "figures" / "sgd_frontier.png"
RUNS = ROOT / "runs" / "sgd_frontier.jsonl"
BATCH, STEPS = 4, 1000
MOMENTUM = 0.9
CLIP = 0.25
"""The largest norm of a gradient."""
LEARNING_RATE = 1.5
"""Dense's best."""
AIM = 0.03


@dataclass(frozen=True)
class Method:
    """How the workers of a job combine what they learn.

    Attributes:
        words: for the table.
        sends: ``dense``: the mean of all gradients, every step. ``gradients``: compressed, with error feedback.
            ``updates``: each worker steps by its own gradients; every ``every`` steps, the difference to the common
            anchor is sent, with error feedback.
        config: of the containers; None: updates are averaged in float32. With the memory ``dgc``, the optimizer has no
            momentum, and does not clip.
        every: steps from one synchronisation to the next, H.
        momentum: of the outer SGD, whose gradient is the mean of the decoded updates; Nesterov momentum.
        decay: factor of the residual before each synchronisation.
        lr: factor of the learning rate that is best for dense.
    """

    words: str
    sends: Literal["dense", "gradients", "updates"] = "updates"
    config: dict[str, Any] | str | None = None
    every: int = 1
    momentum: float = 0.0
    decay: float = 1.0
    lr: float = 1.0

    def rate(self, workers: int) -> float:
        """The largest learning rate, the same for all numbers of workers."""
        return LEARNING_RATE * self.lr


def levels(density: float, bits: int, **more: Any) -> dict[str, Any]:
    """The config that sends the largest elements of the whole model in entropy-coded levels."""
    return {**signs(density), "value": {"name": "qsgd", "bits": bits, "entropy": "rans"}, **more}


WARM_UP = [[25, 0.25], [50, 0.0625], [75, 0.015625], [100, 0.004]]
METHODS = {
    "dense": Method("dense gradients, every step", "dense"),
    "dense_fast": Method("dense, learning rate x 2", "dense", lr=2),
    "dense_faster": Method("dense, learning rate x 4", "dense", lr=4),
    "topk_model": Method("gradients, preset `topk_model`: top 1%, 7 bits", "gradients", "topk_model", lr=2),
    "fewer": Method("gradients, top 0.1%, 4 bits", "gradients", levels(0.001, 4), lr=2),
    "dgc": Method(
        "DGC: top 0.1%, raw values, warm-up of the density in 100 steps",
        "gradients",
        {
            **signs(0.001),
            "index": "rice",
            "value": "raw",
            "density_schedule": WARM_UP,
            "memory": {"name": "dgc", "momentum": MOMENTUM, "clip": 2 * CLIP},
        },
        lr=2,
    ),
    "qsparse_local": Method(
        "updates, H = 8, preset `qsparse_local`: signs, at most 1,000 of a tensor",
        config="qsparse_local",
        every=8,
        lr=2,
    ),
    "sparseloco": Method(
        "updates, H = 15, preset `sparseloco`: top 1/64 of each chunk, 2 bits, decay 0.95",
        config="sparseloco",
        every=15,
        decay=0.95,
        lr=2,
    ),
    "sgd_small": Method("**sgd_small**: updates, H = 4, signs of the top 4.5%", config=signs(0.045), every=4, lr=2),
    "eight": Method("updates, H = 8, signs of the top 10%", config=signs(0.1), every=8, lr=2),
    "often_few": Method("updates, H = 4, signs of the top 1.5%", config=signs(0.015), every=4, lr=2),
    "half": Method("updates, H = 16, signs of the top 10%", config=signs(0.1), every=16, lr=2),
    "few": Method("updates, H = 8, signs of the top 2%", config=signs(0.02), every=8, lr=2),
    "seldom": Method("updates, H = 16, signs of the top 2%", config=signs(0.02), every=16, lr=2),
    "half_momentum": Method(
        "updates, H = 16, signs of the top 10%, momentum 0.3", config=signs(0.1), every=16, momentum=0.3, lr=2
    ),
}
ONE_SEED = {"dense_fast", "dense_faster"}
"""Methods that need no more seeds: they show that the learning rate is dense's best."""


def clipped(gradients: torch.Tensor) -> torch.Tensor:
    """Scales each row down to a norm of ``CLIP``, in place."""
    gradients *= (CLIP / gradients.norm(dim=1, keepdim=True)).clamp(max=1.0)
    return gradients


def train(name: str, workers: int, steps: int, seed: int) -> Run:
    """One run of SGD with momentum. Every gradient that a step is made with is clipped first."""
    torch.set_num_threads(1)
    began = time.process_time()
    job, method = Job(BATCH), METHODS[name]
    start = initial(seed).numpy()
    dense, alone = method.sends == "dense", method.sends == "updates"
    config = Config.load(method.config) if method.config else None
    ranks = SimulatedRanks(config, workers, SIZES) if config else DenseRanks(workers)
    own_momentum = config is not None and config.has_velocity
    updates = LocalUpdates(ranks, start, method.decay, Outer(momentum=method.momentum))
    local = torch.nn.Parameter(torch.from_numpy(updates.local if alone else start[None].copy()))
    lr = method.rate(workers)
    inner = torch.optim.SGD([local], lr=lr, momentum=0.0 if own_momentum else MOMENTUM)
    generators = [torch.Generator().manual_seed(1000 * seed + 17 + worker) for worker in range(workers)]
    gradients = torch.zeros(1 if dense else workers, NUMEL)
    for step in range(steps):
        if dense:
            job.gradient(local.detach()[0], generators, gradients[0])
        else:
            for worker, generator in enumerate(generators):
                job.gradient(local.detach()[worker if alone else 0], [generator], gradients[worker])
        used = gradients
        if method.sends == "gradients":
            used = torch.from_numpy(ranks.mean([gradient.numpy() for gradient in gradients]))[None]
        local.grad = used if own_momentum else clipped(used)
        inner.param_groups[0]["lr"] = lr * rate(step, steps)
        inner.step()
        if alone and ((step + 1) % method.every == 0 or step + 1 == steps):
            updates.synchronise()
    exchange = traffic.allreduce(4 * NUMEL, workers).sent
    sent = exchange * steps if dense else max(ranks.sent)
    return {
        "name": name, "workers": workers, "steps": steps, "seed": seed, "rate": lr, "settings": asdict(method),
        "loss": job.validate(local.detach()[0]), "share": sent / (exchange * steps),
        "seconds": round(time.process_time() - began, 1),
    }  # fmt: skip


def load(path: Path) -> list[Run]:
    """The runs of a file that have the settings and learning rates of today."""
    return frontier.load(path, METHODS)


TEXT = """\
An LSTM of {numel:,} parameters (a layer of width {hidden}) on the source of Python's standard library, characters,
windows of {context}, {batch} windows a worker and step, {steps:,} steps of SGD with momentum {momentum}, gradients
clipped to a norm of {clip}, warm-up and cosine to 0. Dense has the learning rate {lr:g}, the best of 1.5, 3 and 6 with
2 workers; all others have twice that. As above, all workers run in one process and exchange real containers, and
`bytes / dense` is what a worker sends, relative to a dense float32 ring allreduce in every step. The gap is to dense
with the same seed and as many workers; in brackets, the least and the greatest of the seeds. Where updates are sent,
each worker clips its own gradients and keeps its momentum across synchronisations; momentum in the table is that of the
outer step. The dashed line in the picture is the aim: within {aim} nats.

![loss against bytes](figures/sgd_frontier.png)

{table}

These are losses and bytes, not times, and one small model: for yours, compare with dense before you rely on them.

*{today}, scripts/sgd_frontier.py.*"""


def main(
    quick: Annotated[bool, typer.Option(help="a few minutes: 200 steps, 2 workers, 1 seed, three methods")] = False,
    steps: Annotated[int, typer.Option(min=20, help="of SGD")] = STEPS,
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
        steps, seeds, workers, only = 200, 1, [2], ["dense", "topk_model", "sgd_small"]
    if unknown := set(only) - set(METHODS):
        raise typer.BadParameter(f"no method is named {', '.join(unknown)}; the methods are: {', '.join(METHODS)}")
    wanted = [
        (name, count, steps, seed)
        for seed in range(seeds)
        for count in workers
        for name in only or METHODS
        if not seed or name not in ONE_SEED
    ]
    found_runs = frontier.run_missing(train, METHODS, [] if draw else wanted, runs, processes)
    words = {name: method.words for name, method in METHODS.items()}
    found = frontier.rows(found_runs, words, steps)
    text = frontier.table(found, words)
    print(text)
    if write:
        shown = [row for row in found if row["name"] not in ONE_SEED]
        title = f"An LSTM of {NUMEL / 1e6:.2f} M parameters, SGD with momentum, {steps:,} steps"
        frontier.picture(shown, words, AIM, title, FIGURE)
        body = TEXT.format(
            numel=NUMEL, hidden=HIDDEN, context=CONTEXT, batch=BATCH, steps=steps, momentum=MOMENTUM, clip=CLIP,
            lr=LEARNING_RATE, aim=AIM, table=text, today=date.today(),
        )  # fmt: skip
        doc_sections.write(DOC, "sgd", "A small LSTM under SGD with momentum", body)


if __name__ == "__main__":
    typer.run(main)
