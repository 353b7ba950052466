#!/usr/bin/env python3
"""Two levels in the emulated network: bytes over the link between hosts, and step times; hosts have several ranks.

    scripts/bench/bench_levels.py --hosts 2 --rate 1gbit --write

The script creates the emulated network (scripts/bench/netlab, which needs root), starts itself under mpirun with so
many ranks on each host, and removes it. It takes steps of ``hvd.DistributedOptimizer`` and of DistributedDataParallel
over Gloo: without compression, with a config, and with ``hierarchical: true`` besides. Bytes are those that a host has
received over its link, the most of all hosts. After the steps it checks that all ranks' parameters are equal bit for
bit, and that what was applied and what waits in the residuals are together the gradients.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("dev", "train"))

import doc_sections
import emulated_network
import numpy as np
import typer
from emulated_network import received_bytes

from hvd_deepreduce.tools.gradients import generated

WARM = 2
KINDS = {"dense": None, "one level": False, "two levels": True}


def check(job: Any, model: Any, compression: Any, gradients: Any, what: str) -> float:
    """The largest error of: applied + residuals == gradients, of the gradients' largest element.

    Args:
        gradients: the sum of those of all steps, of each parameter.

    Raises:
        AssertionError: the ranks' parameters differ.
    """
    import torch

    applied = torch.cat([-p.detach() for p in model.parameters()])
    bits = applied.view(torch.int32).long()
    assert torch.equal(job.sum(bits), bits * job.size), f"{what}: the ranks' parameters differ"
    kept = torch.zeros_like(applied, dtype=torch.float64)
    if compression is not None:
        residuals, at = compression.state_dict()["residuals"], 0
        for name, parameter in model.named_parameters():
            if name in residuals:
                kept[at : at + parameter.numel()] = residuals[name].reshape(-1).double()
            at += parameter.numel()
    came = job.sum(torch.cat(gradients).double() - kept)
    return float((job.size * applied.double() - came).abs().max() / came.abs().max())


def inside(framework: str, numel: int, tensors: int, config: str, repeat: int, output: Path) -> None:
    """A rank of the emulated network's job."""
    import torch
    from given import Given
    from launchers import LAUNCHERS

    from hvd_deepreduce import Config

    job, rows = LAUNCHERS[framework](process_sets="dynamic"), {}
    torch.set_num_threads(1)
    sizes = [numel // tensors] * (tensors - 1) + [numel - (tensors - 1) * (numel // tensors)]
    gradients = torch.from_numpy(generated(numel, job.rank)).split(sizes)
    for name, hierarchical in KINDS.items():
        given = "none" if hierarchical is None else Config.load(config, hierarchical=hierarchical).to_dict()
        model = Given(sizes)
        forward, optimizer, compression = job.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), given)
        seconds, counted = [], []
        for _ in range(WARM + repeat):
            job.barrier()
            before, began = received_bytes(), time.perf_counter()
            optimizer.zero_grad()
            forward(gradients).backward()
            optimizer.step()
            seconds.append(time.perf_counter() - began)
            job.barrier()
            counted.append(received_bytes() - before)
        of_rank = torch.zeros(job.size, 2, dtype=torch.float64)
        of_rank[job.rank] = torch.tensor([np.median(seconds[WARM:]), np.median(counted[WARM:])])
        slowest, most = job.sum(of_rank).max(0).values.tolist()
        error = check(job, model, compression, [(WARM + repeat) * one.double() for one in gradients], name)
        assert error < 1e-4, f"{name}: applied + residuals differ from the gradients by {error}"
        stats = {} if compression is None else compression.stats()["last_step"]
        rows[name] = {"seconds": slowest, "bytes": most, "error": error, "stats": stats}
        if job.rank == 0:
            print(f"{framework} {name}: {slowest:.3f} s, {most:,.0f} bytes over a host's link, error {error:.1e}",
                  flush=True)  # fmt: skip
        if compression is not None:
            compression.close()
        job.barrier()
    if job.rank == 0:
        output.write_text(json.dumps(rows))
    job.end()


def table(results: dict[str, Any], hosts: int, ranks: int) -> str:
    """The rows of all frameworks as Markdown."""
    head = [f"{hosts} hosts x {ranks} ranks", "bytes a step over a host's link, in", "of one level's", "seconds a step"]
    return doc_sections.table(head, (
        [f"{framework}: {name}", f"{row['bytes']:,.0f}", f"{row['bytes'] / rows['one level']['bytes']:.2f}x",
         f"{row['seconds']:.3f}"]
        for framework, rows in results.items() for name, row in rows.items()
    ))  # fmt: skip


def main(
    hosts: Annotated[int, typer.Option(help="hosts of the emulated network")] = 2,
    ranks: Annotated[int, typer.Option(help="ranks of each host")] = 2,
    rate: Annotated[str, typer.Option(help="of each link, as in 1gbit or 100mbit")] = "1gbit",
    numel: Annotated[int, typer.Option(help="elements of the gradients, generated as in bench_net.py")] = 10_000_000,
    tensors: Annotated[int, typer.Option(help="parameters that they are divided into")] = 50,
    config: Annotated[str, typer.Option(help="preset or file; two levels add hierarchical: true")] = "recommended",
    frameworks: Annotated[str, typer.Option(help="comma-separated: horovod, ddp")] = "horovod,ddp",
    repeat: Annotated[int, typer.Option(help="steps that are counted")] = 5,
    write: Annotated[bool, typer.Option(help="write a section of docs/results/benchmarks.md")] = False,
    output: Annotated[Path, typer.Option(help="JSON file for the results")] = Path("runs/bench_levels.json"),
    rank_of: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measures two levels between hosts of several ranks."""
    output = output.resolve()
    if rank_of:
        inside(rank_of, numel, tensors, config, repeat, output)
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    variables = {"MASTER_ADDR": emulated_network.address(0), "MASTER_PORT": "29511"}
    results = {}
    for framework in frameworks.split(","):
        options = {
            "numel": numel, "tensors": tensors, "config": config, "repeat": repeat, "output": output,
            "rank-of": framework,
        }  # fmt: skip
        arguments = [__file__, *(f"--{key}={value}" for key, value in options.items())]
        emulated_network.run(arguments, hosts, rate, ranks, variables, seconds=600)
        results[framework] = json.loads(output.read_text())
    output.write_text(json.dumps(results, indent=1))
    body = table(results, hosts, ranks)
    print(body)
    for framework, rows in results.items():
        share = rows["two levels"]["bytes"] / rows["one level"]["bytes"]
        assert share <= 0.55, f"{framework}: two levels have {share:.2f} of the bytes of one"
    if write:
        load = os.getloadavg()[0]
        text = f"""\
`scripts/bench/bench_levels.py --hosts {hosts} --ranks {ranks} --rate {rate} --write`: {
            numel:,} generated float32 gradients in
{tensors} parameters (clustered as in bench_net.py), config `{config}`, and the same with `hierarchical: true`. The
baseline is `one level`, in which all ranks exchange containers; `dense` is the framework's own allreduce. Bytes are
those of the busiest host's link, with headers. Seconds are medians of the slowest rank; {hosts * ranks} ranks share
{os.cpu_count()} cores, load {load:.1f}, so they show little more than what the processors do. After the steps all ranks
had the same parameters, bit for bit, and applied + residuals == gradients to {
            max(row["error"] for rows in results.values() for row in rows.values()):.0e} of the largest element.

{body}"""
        title = f"Two levels: {hosts} hosts of {ranks} ranks at {rate}"
        doc_sections.write(doc_sections.RESULTS / "benchmarks.md", f"levels_{hosts}x{ranks}_{rate}", title, text)


if __name__ == "__main__":
    typer.run(main)
