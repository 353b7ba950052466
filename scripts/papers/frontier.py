"""Loss against bytes of small language models: dense, gradients, updates; docs/results/accuracy.md.

    python scripts/papers/frontier.py gpt --quick                  # a small GPT under AdamW; a few minutes
    python scripts/papers/frontier.py lstm --processes 2 --write   # an LSTM under SGD: all methods, 3 seeds

All workers of a job run in one process, and exchange real containers (simulated_ranks.py). A run is a line of
runs/JOB_frontier.jsonl; runs that are there already are not repeated, so a list can be stopped and continued. It is a
dict with ``name`` (of its method), ``workers``, ``steps``, ``seed``, ``rate`` (the largest learning rate), ``settings``
(of its method), ``loss`` and ``share``: bytes, relative to dense.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import Annotated, Any, Literal

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("dev", "train"))

import doc_sections
import figure_kit
import gpt_job
import lstm_job
import matplotlib
import torch
import typer
from gpt_job import clipped
from local_updates import LocalUpdates, Outer
from simulated_ranks import DenseRanks, SimulatedRanks

from hvd_deepreduce import Config
from hvd_deepreduce.exchange import traffic

DOC = figure_kit.RESULTS / "accuracy.md"
BATCH = 4
AIM = 0.03
"""The gap in nats that the pictures show as a line."""
MARKERS = {2: "o", 4: "s"}
Run = dict[str, Any]


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


def signs(density: float) -> dict[str, Any]:
    """The config that sends the signs of the largest elements of the whole model, and their mean magnitude."""
    return {"sparsifier": {"name": "topk", "density": density}, "index": "auto", "value": "sign", "scope": "model"}


def levels(density: float, bits: int) -> dict[str, Any]:
    """The config that sends the largest elements of the whole model in entropy-coded levels."""
    return {**signs(density), "value": {"name": "qsgd", "bits": bits, "entropy": "rans"}}


GPT_METHODS = {
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
WARM_UP = [[25, 0.25], [50, 0.0625], [75, 0.015625], [100, 0.004]]
LSTM_METHODS = {
    "dense": Method("dense gradients, every step", "dense"),
    "dense_fast": Method("dense, learning rate x 2", "dense", lr=2),
    "dense_faster": Method("dense, learning rate x 4", "dense", lr=4),
    "topk_model": Method("gradients, preset `topk_model`: top 1%, 7 bits", "gradients", "topk_model", lr=2),
    "fewer": Method("gradients, top 0.1%, 4 bits", "gradients", levels(0.001, 4), lr=2),
    "dgc": Method(
        "DGC: top 0.1%, raw values, warm-up of the density in 100 steps", "gradients",
        {**signs(0.001), "index": "rice", "value": "raw", "density_schedule": WARM_UP,
         "memory": {"name": "dgc", "momentum": 0.9, "clip": 0.5}}, lr=2,
    ),
    "qsparse_local": Method(
        "updates, H = 8, preset `qsparse_local`: signs, at most 1,000 of a tensor", config="qsparse_local", every=8,
        lr=2,
    ),
    "sparseloco": Method(
        "updates, H = 15, preset `sparseloco`: top 1/64 of each chunk, 2 bits, decay 0.95", config="sparseloco",
        every=15, decay=0.95, lr=2,
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
}  # fmt: skip


@dataclass
class Job:
    """What is trained, and how its table is made.

    Attributes:
        model: the model, or its module: ``initial``, ``NUMEL``, ``SIZES`` and ``Job``.
        optimizer: of a worker, for parameters and a learning rate.
        clip: the largest norm of a gradient.
        rates: dense's best learning rate, by the number of workers; for other numbers, that of the next lower one.
        methods: by name.
        tuned: methods that show that the learning rate is dense's best: not in the picture.
        more_seeds: methods with as many seeds as are asked for; of the others there is one.
        steps: of the optimizer.
        quick: steps and methods of a run of a few minutes.
        section, heading, title: of the page's section, whose text is on the page, and of the picture.
    """

    model: ModuleType
    optimizer: Callable[..., torch.optim.Optimizer]
    clip: float
    rates: dict[int, float]
    methods: dict[str, Method]
    tuned: set[str]
    more_seeds: set[str]
    steps: int
    quick: tuple[int, list[str]]
    section: str
    heading: str
    title: str

    def rate(self, method: Method, workers: int) -> float:
        """The largest learning rate."""
        best = self.rates[max((known for known in self.rates if known <= workers), default=min(self.rates))]
        return best * method.lr * (workers**0.5 if method.longer else 1.0)


JOBS = {
    "gpt": Job(
        gpt_job.SMALL, partial(torch.optim.AdamW, betas=(0.9, 0.99), weight_decay=0.1, fused=True), 1.0,
        {2: 2.5e-3, 4: 4e-3}, GPT_METHODS, {"dense_slow", "dense_fast"}, {"dense", "adamw_safe", "adamw_small"},
        2000, (300, ["dense", "gradients", "adamw_safe", "adamw_small"]),
        "gpt", "A small GPT under AdamW", "A GPT of {millions:.2f} M parameters, AdamW, {steps:,} steps",
    ),
    "lstm": Job(
        lstm_job, partial(torch.optim.SGD, momentum=0.9), 0.25, {2: 1.5}, LSTM_METHODS, {"dense_fast", "dense_faster"},
        set(LSTM_METHODS) - {"dense_fast", "dense_faster"}, 1000, (200, ["dense", "topk_model", "sgd_small"]),
        "sgd", "A small LSTM under SGD with momentum",
        "An LSTM of {millions:.2f} M parameters, SGD with momentum, {steps:,} steps",
    ),
}  # fmt: skip


def train(job_name: str, name: str, workers: int, steps: int, seed: int) -> Run:
    """One run. Every gradient that a step is made with is clipped first."""
    torch.set_num_threads(1)
    began = time.process_time()
    setup = JOBS[job_name]
    model, method = setup.model, setup.methods[name]
    job, start = model.Job(BATCH), model.initial(seed).numpy()
    dense, alone = method.sends == "dense", method.sends == "updates"
    config = Config.load(method.config) if method.config else None
    ranks = SimulatedRanks(config, workers, model.SIZES) if config else DenseRanks(workers)
    own_momentum = config is not None and config.has_velocity
    updates = LocalUpdates(ranks, start, method.decay, Outer(method.outer_lr, method.momentum))
    local = torch.nn.Parameter(torch.from_numpy(updates.local if alone else start[None].copy()))
    lr = setup.rate(method, workers)
    inner = setup.optimizer([local], lr, **({"momentum": 0.0} if own_momentum else {}))
    generators = [torch.Generator().manual_seed(1000 * seed + 17 + worker) for worker in range(workers)]
    gradients = torch.zeros(1 if dense else workers, model.NUMEL)
    for step in range(steps):
        if dense:
            job.gradient(local.detach()[0], generators, gradients[0])
        else:
            for worker, generator in enumerate(generators):
                job.gradient(local.detach()[worker if alone else 0], [generator], gradients[worker])
        used = gradients
        if method.sends == "gradients":
            used = torch.from_numpy(ranks.mean([gradient.numpy() for gradient in gradients]))[None]
        local.grad = used if own_momentum else clipped(used, setup.clip)
        inner.param_groups[0]["lr"] = lr * gpt_job.rate(step, steps)
        inner.step()
        if alone and ((step + 1) % method.every == 0 or step + 1 == steps):
            updates.synchronise()
    exchange = traffic.allreduce(4 * model.NUMEL, workers).sent
    sent = exchange * steps if dense else max(ranks.sent)
    loss, accuracy = job.validate(local.detach()[0])
    return {
        "name": name, "workers": workers, "steps": steps, "seed": seed, "rate": lr, "settings": asdict(method),
        "loss": loss, "accuracy": accuracy, "share": sent / (exchange * steps),
        "seconds": round(time.process_time() - began, 1),
    }  # fmt: skip


def load(job: Job, path: Path) -> list[Run]:
    """The runs of a file that have the settings and learning rates of today."""
    today = {name: json.loads(json.dumps(asdict(method))) for name, method in job.methods.items()}
    defaults = asdict(Method(""))
    return [
        run
        for run in figure_kit.json_lines(path)
        if today.get(run["name"]) == {**defaults, **run["settings"]}
        and run["rate"] == job.rate(job.methods[run["name"]], run["workers"])
    ]


def run_missing(name: str, wanted: Iterable[tuple[str, int, int, int]], path: Path, processes: int) -> list[Run]:
    """Runs what is not in the file yet (method, number of workers, steps and seed of each run), and writes it there;
    returns all runs, as ``load``."""
    there = {(run["name"], run["workers"], run["steps"], run["seed"]) for run in load(JOBS[name], path)}
    missing = [(name, *one) for one in wanted if one not in there]
    path.parent.mkdir(exist_ok=True)
    with ProcessPoolExecutor(processes) as pool, path.open("a") as file:
        for run in pool.map(train, *zip(*missing, strict=True)) if missing else ():
            file.write(json.dumps(run) + "\n")
            file.flush()
            print(f"{run['name']}, {run['workers']} workers, seed {run['seed']}: {run['loss']:.4f} nats", flush=True)
    return load(JOBS[name], path)


def rows(runs: Iterable[Run], words: Mapping[str, str], steps: int) -> list[Run]:
    """A row for each method and number of workers, in the order of ``words``: means over the seeds of the runs of so
    many steps, and the gap to dense at equal seeds."""
    by_job: dict[tuple[int, str], dict[int, Run]] = {}
    for run in runs:
        if run["steps"] == steps:
            by_job.setdefault((run["workers"], run["name"]), {})[run["seed"]] = run
    found = []
    order = list(words)
    for (workers, name), seeds in sorted(by_job.items(), key=lambda item: (item[0][0], order.index(item[0][1]))):
        dense = by_job.get((workers, "dense"), {})
        gaps = [run["loss"] - dense[seed]["loss"] for seed, run in seeds.items() if seed in dense]
        mine = list(seeds.values())
        found.append({
            "name": name, "workers": workers, "seeds": len(mine), "share": mean(run["share"] for run in mine),
            "loss": mean(run["loss"] for run in mine), "gap": mean(gaps) if gaps else None,
            "least": min(gaps, default=None), "most": max(gaps, default=None),
        })  # fmt: skip
    return found


def table(found: Iterable[Run], words: Mapping[str, str]) -> str:
    """The rows as a Markdown table."""
    lines = []
    for row in found:
        gap = "" if row["gap"] is None else f"{row['gap']:+.3f}"
        if row["seeds"] > 1 and row["gap"]:
            gap += f" ({row['least']:+.3f} to {row['most']:+.3f})"
        share = f"{row['share']:.2%}" if row["share"] > 0.01 else f"{row['share']:.3%}"
        lines.append([row["workers"], words[row["name"]], share, f"{row['loss']:.4f}", gap, row["seeds"]])
    return doc_sections.table(["workers", "what is sent", "bytes / dense", "loss", "gap", "seeds"], lines)


def picture(found: Iterable[Run], words: Mapping[str, str], aim: float, title: str, path: Path) -> None:
    """Plots the gap to dense against the share of bytes, one point for each row; ``aim`` is a gap, drawn as a line."""
    shown = [row for row in found if row["gap"] is not None]
    names = [name for name in words if any(row["name"] == name for row in shown)]
    colors = matplotlib.colormaps["tab20"].colors
    figure, axes = figure_kit.picture(width=11.5, height=4.8)
    for row in shown:
        color = colors[names.index(row["name"]) % len(colors)]
        axes.plot(100 * row["share"], row["gap"], MARKERS.get(row["workers"], "^"), color=color, markersize=8)
    for number, name in enumerate(names):
        label = words[name].replace("*", "").replace("`", "")
        axes.plot([], [], "o", color=colors[number % len(colors)], label=label)
    for workers in sorted({row["workers"] for row in shown}):
        axes.plot([], [], MARKERS.get(workers, "^"), color="grey", label=f"{workers} workers")
    axes.axhline(aim, ls="--", color="grey", linewidth=0.8)
    axes.set(xscale="log", xlabel="bytes that a worker sends, % of a dense float32 ring allreduce in every step",
             ylabel="validation loss above dense, nats", title=title)  # fmt: skip
    axes.set_yscale("symlog", linthresh=0.1)  # linear up to 0.1
    axes.set_yticks([-0.03, 0, 0.03, 0.06, 0.1, 0.3, 1], ["-0.03", "0", "0.03", "0.06", "0.1", "0.3", "1"])
    axes.set_ylim(-0.06, 1.2)
    axes.xaxis.set_major_formatter("{x:g}")
    figure.legend(fontsize=8, frameon=False, loc="outside right center")
    figure_kit.save(figure, path)


def main(
    name: Annotated[Literal["gpt", "lstm"], typer.Argument(help="what is trained")],
    quick: Annotated[bool, typer.Option(help="a few minutes: few steps and methods, 2 workers, 1 seed")] = False,
    steps: Annotated[int | None, typer.Option(min=20, help="of the workers' optimizer; default: the job's")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="runs of each method")] = 3,
    workers: Annotated[list[int], typer.Option(min=2, help="numbers of workers; repeat for more")] = [2, 4],  # noqa: B006
    only: Annotated[list[str], typer.Option(help="methods to run; repeat for more")] = [],  # noqa: B006
    processes: Annotated[int, typer.Option(min=1, help="runs at a time, each on one thread")] = 1,
    runs: Annotated[Path | None, typer.Option(help="file of the runs, which is continued")] = None,
    draw: Annotated[bool, typer.Option(help="train nothing: only the runs that the file has")] = False,
    write: Annotated[bool, typer.Option(help="write docs/results/accuracy.md and its picture")] = False,
) -> None:
    """Trains by each method, and prints loss against bytes."""
    job = JOBS[name]
    if write and steps not in (None, job.steps):
        raise typer.BadParameter(f"--write is for {job.steps} steps, of which {DOC.name} tells")
    steps = steps or job.steps
    if quick:
        (steps, only), seeds, workers = job.quick, 1, [2]
    if unknown := set(only) - set(job.methods):
        raise typer.BadParameter(f"no method is named {', '.join(unknown)}; the methods are: {', '.join(job.methods)}")
    wanted = [
        (method, count, steps, seed)
        for seed in range(seeds)
        for count in workers
        for method in only or job.methods
        if not seed or method in job.more_seeds
    ]
    path = runs or figure_kit.ROOT / "runs" / f"{job.section}_frontier.jsonl"
    words = {method: one.words for method, one in job.methods.items()}
    found = rows(run_missing(name, [] if draw else wanted, path, processes), words, steps)
    text = table(found, words)
    print(text)
    if write:
        shown = [row for row in found if row["name"] not in job.tuned]
        path = figure_kit.FOLDER / f"{job.section}_frontier.png"
        picture(shown, words, AIM, job.title.format(millions=job.model.NUMEL / 1e6, steps=steps), path)
        parts = [f"![loss against bytes](figures/{path.name})", text]
        dated = f"*{date.today()}, scripts/papers/frontier.py.*"
        doc_sections.write(DOC, job.section, job.heading, doc_sections.refreshed(DOC, job.section, parts, dated))


if __name__ == "__main__":
    typer.run(main)
