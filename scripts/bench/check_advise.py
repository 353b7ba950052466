#!/usr/bin/env python3
"""Checks ``hvd-deepreduce advise``: the step times that it predicts beside those measured in the emulated network.

    scripts/bench/check_advise.py --write

For each rate the script creates the emulated network of scripts/bench/netlab and runs itself on each host. Every model
is trained by several jobs in the same processes, under torch.distributed with Gloo: DDP without a hook, with PyTorch's
fp16 hook, with deepreduce_hook, and LocalSGD; and without any exchange. Their steps are interleaved. A step's time is
that of its slowest rank; of LocalSGD, it is a period's divided by its local steps. Then the same processes do what
``advise --measure`` does: they measure the link and the codecs, and predict. A prediction is given the measured time of
the step without an exchange, and how many ranks share a core; it is given no other measured step.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("dev", "train"))

import doc_sections
import emulated_network
import numpy as np
import typer
from bench_ddp import joined, slowest
from emulated_network import MEMORY, PRIORITY_HELP, received_bytes
from step_times import interleaved

DOC = emulated_network.ROOT / "docs" / "advise.md"
RATES = "100mbit,1gbit,10gbit,memory"
GRADIENTS, UPDATES = "recommended", "adamw_safe"
"""The presets that are measured."""
ALONE = 4
"""Steps without an exchange that are timed together."""
WARM = 2
"""Rounds that do not count: DDP divides its buckets anew after the first."""
ENOUGH, LEAST, MOST = 18.0, 3, 7
"""Seconds of rounds that count, of each model; and their least and greatest number."""
AIM, SLOWER = 0.25, 0.05
"""The most that a prediction may deviate, and the most that the chosen way may be slower than the best one."""


@dataclass(frozen=True)
class Task:
    """A model and its training data.

    Attributes:
        about: what a table says of it.
        model: makes it.
        batch: images a rank and step.
    """

    about: str
    model: Callable[[], Any]
    batch: int


def resnet() -> Any:
    """That of bench_ddp.py."""
    from train_torch import ResNet

    return ResNet(272)


def transformer() -> Any:
    """Four layers of width 384 that read an image as 64 pixels: 7.1 million parameters."""
    import torch
    from torch import nn

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(384, 6, 1536, 0.0, batch_first=True)
            self.pixels = nn.Linear(1, 384)
            self.places = nn.Parameter(0.02 * torch.randn(64, 384))
            self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
            self.head = nn.Linear(384, 10)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            read = self.pixels(images.flatten(1)[..., None]) + self.places
            scores: torch.Tensor = self.head(self.layers(read).mean(1))
            return scores

    return Transformer()


TASKS = {
    "resnet": Task("ResNet of 10.8 M parameters in 20 tensors, 4 images", resnet, 4),
    "transformer": Task("transformer of 7.1 M parameters in 53 tensors, 1 image", transformer, 1),
}


class Job:
    """One way to train a task: ``no exchange``, ``dense``, ``fp16``, or a preset's name."""

    def __init__(self, name: str, task: Task) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        from torch.nn.parallel import DistributedDataParallel
        from train_torch import digits

        from hvd_deepreduce import Config
        from hvd_deepreduce.torch import LocalSGD, ddp

        torch.manual_seed(0)
        self.model = task.model()
        self._group = dist.new_group(backend="gloo")
        self._forward: Any = self.model
        self._optimizer: Any = torch.optim.SGD(self.model.parameters(), 0.01, momentum=0.9, fused=True)
        self._closes: Any = None
        # A rank that exchanges nothing does not wait for others: a user would time a loop, too.
        self.steps = ALONE if name == "no exchange" else 1
        if name not in ("no exchange", "dense", "fp16") and (local := Config.load(name).local) is not None:
            self._optimizer = self._closes = LocalSGD(self._optimizer, self.model, name, process_group=self._group)
            self.steps = local.every
        elif name != "no exchange":
            self._forward = DistributedDataParallel(
                self.model, process_group=self._group, gradient_as_bucket_view=True, broadcast_buffers=False
            )
            if name == "fp16":
                self._forward.register_comm_hook(self._group, default_hooks.fp16_compress_hook)
            elif name != "dense":
                self._closes = ddp.DeepReduceState(name, self._group)
                self._forward.register_comm_hook(self._closes, ddp.deepreduce_hook)
        self._images, self._labels, _, _ = digits()
        self._batch, self._at = task.batch, dist.get_rank() * task.batch

    def run(self) -> None:
        """A step; with local updates, a period."""
        from torch.nn import functional

        for _ in range(self.steps):
            part = slice(self._at, self._at + self._batch)
            self._at = (self._at + 16 * self._batch) % (len(self._images) - self._batch)
            self._optimizer.zero_grad()
            functional.cross_entropy(self._forward(self._images[part]), self._labels[part]).backward()
            self._optimizer.step()

    def close(self) -> None:
        """Ends its threads and groups; on all ranks after the same step."""
        import torch.distributed as dist

        if self._closes is not None:
            self._closes.close()
        self._forward = None
        dist.destroy_process_group(self._group)


def measured(task: Task, names: list[str]) -> tuple[dict[str, list[float]], dict[str, float], list[int]]:
    """Times the jobs.

    Returns:
        Of each job, the seconds of its steps, and the bytes that the busiest rank received in one; and the sizes of the
        model's tensors.
    """
    jobs = {name: Job(name, task) for name in names}
    received: dict[str, list[int]] = {name: [] for name in names}

    def counted(name: str) -> None:
        before = received_bytes()
        jobs[name].run()
        received[name].append(received_bytes() - before)

    steps = {name: lambda name=name: counted(name) for name in names}
    first = interleaved(steps, 1, slowest, WARM)
    rounds = int(np.clip(ENOUGH / sum(times[0] for times in first.values()), LEAST, MOST))
    seconds = interleaved(steps, rounds, slowest, 0)
    most = {name: slowest(np.array(counts[-rounds:], np.float64)) for name, counts in received.items()}
    sizes = [one.numel() for one in jobs[names[0]].model.parameters()]
    of_step = {name: job.steps for name, job in jobs.items()}
    for job in jobs.values():
        job.close()
    return (
        {name: [one / of_step[name] for one in times] for name, times in seconds.items()},
        {name: float(np.median(most[name])) / of_step[name] for name in names},
        sizes,
    )


def inside(rate: str, tasks: list[str], output: Path) -> None:
    """One rank's part; rank 0 writes what was found."""
    import torch.distributed as dist

    from hvd_deepreduce import Config
    from hvd_deepreduce.tools.advise import prediction, report, speeds
    from hvd_deepreduce.tools.ranks import TorchRanks

    comm = joined(rate)
    ranks = TorchRanks()
    sharing = max(1.0, comm.size / len(os.sched_getaffinity(0)))
    found: list[dict[str, Any]] = []
    for name in tasks:
        # Its place in the run is between others', as that of a user's measurement would be.
        link = speeds.link(ranks, sharing)
        names = [prediction.LOCAL, prediction.DENSE, prediction.FP16, GRADIENTS, UPDATES]
        seconds, received, sizes = measured(TASKS[name], names)
        medians = {job: float(np.median(times)) for job, times in seconds.items()}
        job = prediction.Job(
            sizes, comm.size, 1 if rate != MEMORY else comm.size, medians[prediction.LOCAL], sharing=sharing
        )
        configs = [(preset, Config.load(preset)) for preset in (GRADIENTS, UPDATES)]
        said = report.advise(job, link, configs, collectives=ranks)
        jobs = {
            one.name: {**asdict(one), "measured": seconds[one.name], "measured_bytes": received[one.name]}
            for one in said.predictions
        }
        choice = prediction.best(said.predictions).name
        found.append({"rate": rate, "task": name, "link": asdict(link), "choice": choice, "jobs": jobs})
        if comm.rank == 0:
            print(*rows([found[-1]])[1:], sep="\n", flush=True)
    if comm.rank == 0:
        about = {"hosts": comm.size, "cores": os.cpu_count(), "load": os.getloadavg()[0], "setups": found}
        output.write_text(json.dumps(about, indent=1))
    dist.destroy_process_group()


def deviation(job: dict[str, Any]) -> float:
    """By which share the prediction is longer than the measured time; negative: shorter."""
    return float(job["seconds"] / np.median(job["measured"]) - 1)


def behind(setup: dict[str, Any]) -> float:
    """By which share the way to exchange gradients that is predicted to be the fastest is slower than the best one that
    was measured."""
    times = {
        name: float(np.median(job["measured"]))
        for name, job in setup["jobs"].items()
        if name != "no exchange" and not job["updates"]
    }
    return times[setup["choice"]] / min(times.values()) - 1


def gain_error(setup: dict[str, Any], name: str) -> float:
    """By which share the predicted ratio of dense's time to a job's is larger than the measured one."""
    return (1 + deviation(setup["jobs"]["dense"])) / (1 + deviation(setup["jobs"][name])) - 1


def rows(setups: list[dict[str, Any]]) -> list[str]:
    """Of the table, as Markdown; the first one is the head."""
    lines = [
        "| link | model | job | measured ms (quartiles) | predicted ms | deviation | of this, codec | link | MB in, "
        "measured | predicted |"
    ]
    for setup in setups:
        for name, job in setup["jobs"].items():
            low, middle, high = (1e3 * np.quantile(job["measured"], [0.25, 0.5, 0.75])).tolist()
            cells = [
                setup["rate"], setup["task"], f"`{name}`" + " (fastest)" * (name == setup["choice"]),
                f"{middle:.0f} ({low:.0f} to {high:.0f})", f"{1e3 * job['seconds']:.0f}",
                "given" if name == "no exchange" else f"{deviation(job):+.0%}", f"{1e3 * job['codec']:.0f}",
                f"{1e3 * job['link']:.0f}", f"{job['measured_bytes'] / 1e6:.2f}", f"{job['received'] / 1e6:.2f}",
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def report(read: dict[str, Any]) -> str:
    """The section of the page."""
    setups = read["setups"]
    compared = [(abs(deviation(job)), setup, name) for setup in setups for name, job in setup["jobs"].items()
                if name != "no exchange"]  # fmt: skip
    worst, where, name = max(compared, key=lambda one: one[0])
    missed = sum(one[0] > AIM for one in compared)
    late = max(map(behind, setups))
    ratios = max(abs(gain_error(setup, name)) for _, setup, name in compared)
    head, *lines = rows(setups)
    links = "; ".join(
        f"{setup['rate']}, {setup['task']}: {setup['link']['bits_per_second'] / 1e9:.3g} Gbit/s, "
        f"{1e6 * setup['link']['latency']:.0f} us, {1e9 * setup['link']['cpu']:.2f} ns"
        for setup in setups
    )
    tasks = "; ".join(
        f"`{one}`: {TASKS[one].about} a rank and step" for one in dict.fromkeys(s["task"] for s in setups)
    )
    return (
        f"{len(compared)} step times, of {len(setups)} pairs of a model and a link, on {read['hosts']} hosts of the "
        f"emulated network, which share {read['cores']} cores, with one thread a rank; {MEMORY}: no emulated "
        f"network, the ranks share the machine's memory (load {read['load']:.1f} at the end). {tasks}. Steps "
        "of all jobs are interleaved; "
        "measured times are medians. The job `no exchange` is given to the model, and so is that "
        f"{read['hosts'] / read['cores']:g} ranks share a core; all else it measures. `MB in` is what came over a "
        "host's link in a step.\n\n"
        f"**Worst deviation: {worst:.0%}** ({where['rate']}, {where['task']}, `{name}`); {missed} of {len(compared)} "
        f"are beyond the aim of {AIM:.0%}; the median is {np.median([one[0] for one in compared]):.0%}. **The way to "
        f"exchange gradients that is predicted to be the fastest was at most {late:.1%} slower than the best measured "
        f"one** (aim: {SLOWER:.0%}). How many times as long dense takes was predicted to within {ratios:.0%}.\n\n"
        + "\n".join([head, "| " + " | ".join(["---"] * 3 + ["---:"] * 7) + " |", *lines])
        + f"\n\nMeasured links (rate, latency of a message, processor time of a byte): {links}.\n\n"
        f"*{date.today()}, scripts/bench/check_advise.py.*"
    )


def main(
    rates: Annotated[str, typer.Option(help="comma-separated rates of the links; memory: no emulated network")] = RATES,
    tasks: Annotated[str, typer.Option(help="comma-separated: " + ", ".join(TASKS))] = ",".join(TASKS),
    hosts: Annotated[int, typer.Option(min=2, help="number of hosts, one rank each")] = 4,
    output: Annotated[Path, typer.Option(help="JSON file")] = Path("runs/check_advise.json"),
    write: Annotated[bool, typer.Option("--write", help="write the table to docs/advise.md")] = False,
    priority: Annotated[int, typer.Option(help=PRIORITY_HELP)] = 0,
    rank: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measures and predicts, and prints a table."""
    names = tasks.split(",")
    if unknown := set(names) - set(TASKS):
        raise typer.BadParameter(f"--tasks has {', '.join(sorted(unknown))}: choose from {', '.join(TASKS)}")
    if rank:
        emulated_network.prioritize(priority)
        inside(rank, names, output)
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    parts = []
    for rate in rates.split(","):
        part = output.with_suffix(f".{rate}.json")
        arguments = ["--rank", rate, "--tasks", tasks, "--output", str(part), "--priority", str(priority)]
        emulated_network.run([__file__, *arguments], hosts, rate)
        parts.append(json.loads(part.read_text()))
        part.unlink()
    whole = {**parts[-1], "setups": [setup for part in parts for setup in part["setups"]]}
    output.write_text(json.dumps(whole, indent=1))
    body = report(whole)
    print(body)
    if write:
        doc_sections.write(DOC, "check", "Predicted and measured", body)


if __name__ == "__main__":
    sys.path.insert(0, str(emulated_network.ROOT))
    typer.run(main)
