#!/usr/bin/env python3
"""Where the time of a step goes: when each bucket is encoded, awaited and decoded, on rank 0 in the emulated network.

    scripts/bench/step_parts.py --rate 1gbit --write

Steps of ``hvd.DistributedOptimizer`` with ResNet-50's tensors and gradients that are given, as bench_net.py's adapters;
the times are those of the timeline (docs/watching.md), medians over the steps. Needs root and iproute2, but for
``--rate memory``.
"""

import os
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Annotated

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("dev", "train"))

import doc_sections
import emulated_network
import typer

Spans = dict[str, list[tuple[float, float]]]
"""By what is done: the milliseconds of its beginning and its end, since the step's beginning, in each step."""


def measured(config: str, steps: int, folder: str) -> Spans:
    """A rank's steps. The first five are not counted."""
    os.environ["HVD_DEEPREDUCE_TIMELINE"] = f"{folder}/trace"
    import horovod.torch as hvd
    import torch
    from bench_step import SHAPES
    from given import Given, horovod_optimizer

    from hvd_deepreduce.engine import timeline
    from hvd_deepreduce.tools.gradients import generated

    hvd.init()
    torch.set_num_threads(1)
    sizes = SHAPES["resnet50"]()
    gradients = torch.from_numpy(generated(sum(sizes), hvd.rank())).split(sizes)
    model = Given(sizes)
    optimizer, compression = horovod_optimizer("job", model, config)
    moments = []
    for _ in range(steps + 5):
        hvd.barrier()
        optimizer.zero_grad()
        began = time.perf_counter()
        model(gradients).backward()
        passed = time.perf_counter()
        optimizer.synchronize()
        summed = time.perf_counter()
        with optimizer.skip_synchronize():
            optimizer.step()
        moments.append((began, passed, summed, time.perf_counter()))
    spans: Spans = defaultdict(list)
    for began, passed, summed, ended in moments[5:]:
        for name, begin, end in (
            ("**forward and backward pass**", began, passed), ("**`synchronize()`**", passed, summed),
            ("**the optimizer's step**", summed, ended),
        ):  # fmt: skip
            spans[name].append((1e3 * (begin - began), 1e3 * (end - began)))
    if config != "dense":
        compression.close()
        events = timeline.read(Path(f"{folder}/trace.deepreduce.{hvd.rank()}.json"))
        found = [event for event in events if event.get("ph") == "X"]
        buckets = list(dict.fromkeys(event["args"]["bucket"] for event in found))
        for began, _, _, ended in moments[5:]:
            start = 1e6 * (began - timeline.BEGUN)
            for event in found:
                if start <= event["ts"] < start + 1e6 * (ended - began):
                    begin = (event["ts"] - start) / 1e3
                    name = f"{event['name']}, bucket {buckets.index(event['args']['bucket']) + 1} of {len(buckets)}"
                    spans[name].append((begin, begin + event["dur"] / 1e3))
    hvd.barrier()
    hvd.shutdown()
    return spans


def table(spans: Spans) -> str:
    """The parts of a step, in the order in which they begin."""
    rows = [
        (median(begin for begin, _ in times), median(end for _, end in times), median(e - b for b, e in times), name)
        for name, times in spans.items()
    ]
    return doc_sections.table(
        ["", "begins, ms", "ends, ms", "takes, ms"],
        [[name, f"{begin:.1f}", f"{end:.1f}", f"{takes:.1f}"] for begin, end, takes, name in sorted(rows)],
    )


def main(
    rate: Annotated[str, typer.Option(help=emulated_network.RATE_HELP)] = "1gbit",
    hosts: Annotated[int, typer.Option(min=2, help="one rank each")] = 2,
    configs: Annotated[str, typer.Option(help="comma-separated: dense, or a config's name")] = "dense,recommended",
    steps: Annotated[int, typer.Option(min=1, help="that are counted")] = 20,
    priority: Annotated[int, typer.Option(help=emulated_network.PRIORITY_HELP)] = 0,
    write: Annotated[bool, typer.Option("--write", help="write a section of docs/results/benchmarks.md")] = False,
    inside: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Prints a table for each config."""
    if inside:
        emulated_network.prioritize(priority)
        spans = measured(configs, steps, inside)
        if int(os.environ["OMPI_COMM_WORLD_RANK"]) == 0:
            Path(inside, "table").write_text(table(spans))
        return
    parts = []
    for config in configs.split(","):
        with tempfile.TemporaryDirectory() as folder:
            given = ["--configs", config, "--steps", str(steps), "--priority", str(priority), "--inside", folder]
            emulated_network.run([__file__, *given], hosts, rate)
            parts.append(f"`{config}`:\n\n{Path(folder, 'table').read_text()}")
    body = (
        f"`scripts/bench/step_parts.py --rate {rate} --hosts {hosts}`: rank 0 of {hosts}, which share "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end; 25.6 million elements in ResNet-50's 161 "
        f"tensors, medians of {steps} steps. Gradients are given, so that a backward pass is little more than its "
        "copies and what is done at each gradient; where a rank has no core to spare, it encodes buckets there.\n\n"
    ) + "\n\n".join(parts)
    print(body)
    if write:
        doc_sections.write(doc_sections.RESULTS / "benchmarks.md", "step_parts", "Where a step's time goes", body)


if __name__ == "__main__":
    typer.run(main)
