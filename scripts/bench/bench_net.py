#!/usr/bin/env python3
"""Table II of the DenseStream paper, in the emulated network: the time to synchronize a gradient over slow links.

    scripts/bench/bench_net.py --rate 1gbit --network resnet50 --adapters "" --section net_resnet50

The script creates the emulated network, runs itself on each host and removes the emulated network. A reported time is
that of the slowest rank, and the median over the repetitions. ``dense`` is Horovod's allreduce of the whole gradient,
the baseline. ``sparse`` is what the paper times: from the dense gradient of each rank to the dense sum on each rank,
over mpi4py, while Horovod is shut down: its background thread asks all ranks for work every millisecond. ``adapter`` is
what a job does: a step of ``hvd.DistributedOptimizer``, with a backward pass of one multiplication per parameter, and
an update; ``adapter: local`` is the same without Horovod. These steps are interleaved.

The input is captured (scripts/bench/capture_gradients.py), one file for each density: every repetition selects from the
captured accumulator again. Without --network, gradients are generated (tools/gradients.py).
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("dev", "train"))

import captured
import doc_sections
import emulated_network
import numpy as np
from emulated_network import MEMORY, PRIORITY_HELP, RATE_HELP, bits_per_second

from hvd_deepreduce.tools.gradients import generated

ALGORITHMS: dict[str, dict[str, Any]] = {
    "TopkA": {},
    "TopkDA": {},
    "DSA": {"coded": False},
    "DSA coded": {"coded": True},
    "DSA coded float16": {"coded": True, "value": "float16"},
    "DSA coded qsgd": {"coded": True, "value": "qsgd"},
}
ADAPTERS = "recommended,fast,densestream_model"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--hosts", type=int, default=4, help="number of hosts, one rank each")
    add("--rate", default="1gbit", help=RATE_HELP)
    add("--network", default="", help="the network of the captured input, as in resnet50")
    add("--folder", type=Path, default=captured.FOLDER, help="folder of the captured input")
    add("--input", choices=captured.KINDS, default="accumulator", help="what of it is selected from")
    add("--numel", default="24000000", help="comma-separated lengths of generated gradients")
    add("--density", default="0.01,0.05,0.1", help="comma-separated densities")
    add("--only", default="", help="comma-separated: dense, or exchanges to run; default: all")
    add("--adapters", default=ADAPTERS, help="comma-separated configs of the shipped adapter; empty: none")
    add("--repeat", type=int, default=5, help="repetitions that are counted")
    add("--output", type=Path, default=Path("runs/bench_net.json"), help="JSON file for the results")
    add("--section", default="", help="write the tables to this section of docs/results/benchmarks.md")
    add("--profile", action="store_true", help="rank 0 prints the time of each part of a step")
    add("--priority", type=int, default=0, help=PRIORITY_HELP)
    add("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


class Input:
    """What the ranks select from: captured at each density, or generated."""

    def __init__(self, options: argparse.Namespace, rank: int, numel: int) -> None:
        self.options, self.rank, self.numel = options, rank, numel
        self.sizes = [numel // 100] * 99 + [numel - 99 * (numel // 100)]
        self.label = f"generated clustered gradients ({numel:,} elements, 100 tensors)"
        if options.network:
            file = self.file(float(options.density.split(",")[0]))
            self.label = captured.describe(file, options.input)
            self.sizes = captured.parameters(file)[1]
            self.numel = sum(self.sizes)

    def file(self, density: float) -> Path:
        return captured.path(self.options.network, density, folder=self.options.folder)

    def vector(self, density: float) -> np.ndarray:
        """float32 ``[numel]``, of this rank."""
        if self.options.network:
            return captured.read(self.file(density), self.options.input, self.rank)
        return generated(self.numel, self.rank)


class Bench:
    """Times all exchanges on one input."""

    def __init__(self, given: Input, options: argparse.Namespace) -> None:
        from mpi4py import MPI

        self.comm, self.max, self.options, self.given = MPI.COMM_WORLD, MPI.MAX, options, given
        self.residual = np.zeros(given.numel, np.float32)
        self.out = np.zeros_like(self.residual)

    def slowest(self, times: np.ndarray) -> np.ndarray:
        """The element-wise maximum over all ranks."""
        most = np.empty_like(times)
        self.comm.Allreduce(times, most, self.max)
        return most

    def rows(
        self, steps: dict[str, Callable[[], object]], repeat: int, warm: int, prepare: Callable[[str], None]
    ) -> list[dict[str, Any]]:
        """The figures of some exchanges, which are interleaved, of the slowest rank and of the one that got most."""
        found = []
        for name, (times, most, busy) in emulated_network.measured(steps, repeat, self.slowest, warm, prepare).items():
            row = {"name": name, "seconds": float(np.median(times)), "all": times, "bytes_in": int(np.median(most))}
            row["busy"] = self.comm.allreduce(float(np.median(busy)))
            if self.comm.rank == 0:
                print(f"  {name:34s} {row['seconds']:8.3f} s  {row['bytes_in'] / 1e6:9.1f} MB in", flush=True)
            found.append(row)
        return found

    def time(self, name: str, step: Callable[[], None], repeat: int) -> dict[str, Any]:
        """The figures of one exchange, each time with residuals of zero."""
        return self.rows({name: step}, repeat, 1, lambda _: self.residual.fill(0))[0]

    def dense(self, density: float) -> dict[str, Any]:
        import horovod.torch as hvd
        import torch

        tensor, gradient = torch.from_numpy(self.out), self.given.vector(density)

        def step() -> None:
            self.out[:] = gradient
            hvd.allreduce_(tensor, op=hvd.Average, name="dense")

        return self.time("dense (Horovod)", step, min(self.options.repeat, 3))

    def adapters(self, density: float, first: bool) -> list[dict[str, Any]]:
        """Steps of ``hvd.DistributedOptimizer``: those without compression only with ``first``."""
        import torch
        from given import Given, horovod_job

        torch.set_num_threads(1)
        sizes, fed, vector = self.given.sizes, torch.zeros(self.given.numel), self.given.vector(density)
        # The learning rate is 0, so that all jobs can share the parameters' memory.
        weights, gradients = torch.zeros(self.given.numel).split(sizes), fed.split(sizes)
        ways = {"adapter: local": "local", "adapter: dense": "dense"} if first else {}
        ways |= {f"adapter: {config} {100 * density:g}%": config for config in self.options.adapters.split(",")}
        jobs = {
            name: horovod_job(name, Given(sizes, weights), way, 0.0, density=density) for name, way in ways.items()
        }

        def prepare(name: str) -> None:
            """Feeds a gradient with which the residual adds up to the captured vector."""
            fed.copy_(torch.from_numpy(vector))
            if ways[name] not in ("local", "dense"):
                residuals = jobs[name][1].state_dict()["residuals"]
                for number, gradient in enumerate(gradients):
                    if f"{name}.{number:03}" in residuals:
                        gradient -= residuals[f"{name}.{number:03}"].view(-1)

        steps = {name: partial(step, gradients) for name, (step, _) in jobs.items()}
        found = self.rows(steps, self.options.repeat, 2, prepare)
        for name, (_, compression) in jobs.items():
            if ways[name] not in ("local", "dense"):
                compression.close()
        return found

    def sparse(self, name: str, density: float, vector: np.ndarray) -> dict[str, Any]:
        from hvd_deepreduce.codecs.joint.densestream import DenseStream
        from hvd_deepreduce.codecs.sparse_tensor import SparseTensor
        from hvd_deepreduce.exchange.mpi import densestream, sparcml, topk_allgather
        from hvd_deepreduce.ops import select

        modules = {"TopkA": topk_allgather, "TopkDA": sparcml}
        allreduce = modules.get(name, densestream).allreduce
        settings = {} if name in modules else {"codec": DenseStream(**ALGORITHMS[name])}
        kept = max(1, int(density * vector.size))
        spent = {"top-k": 0.0, "exchange": 0.0, "exchange, own CPU": 0.0}

        def step() -> None:
            at = time.perf_counter()
            indices, values = select.topk(self.residual, vector, kept)
            tensor = SparseTensor(vector.size, indices, values)
            spent["top-k"] += time.perf_counter() - at
            at, cpu_at = time.perf_counter(), time.process_time()
            mean = 1 / self.comm.size
            allreduce(self.comm, tensor, out=self.out, scale=mean, residual=self.residual, timeout=120, **settings)
            spent["exchange"] += time.perf_counter() - at
            spent["exchange, own CPU"] += time.process_time() - cpu_at

        row = self.time(f"{name} {100 * density:g}%", step, self.options.repeat)
        row["spent"] = {part: seconds / (self.options.repeat + 1) for part, seconds in spent.items()}
        if self.options.profile and self.comm.rank == 0:
            print("   ", {part: round(seconds, 3) for part, seconds in row["spent"].items()}, flush=True)
        return row


def inside(options: argparse.Namespace) -> None:
    import horovod.torch as hvd
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    emulated_network.prioritize(options.priority)
    results = []
    densities = [float(density) for density in options.density.split(",")]
    wanted = options.only.split(",") if options.only else ["dense", *ALGORITHMS]
    for numel in [0] if options.network else [int(n) for n in options.numel.split(",")]:
        given = Input(options, comm.rank, numel)
        if comm.rank == 0:
            print(given.label, flush=True)
        bench = Bench(given, options)
        rows = []
        hvd.init()
        if "dense" in wanted:
            rows.append(bench.dense(densities[0]))
        for density in densities if options.adapters else []:
            rows += bench.adapters(density, first=density == densities[0])
        hvd.shutdown()  # its background thread asks all ranks for work every millisecond
        for density in densities:
            vector = given.vector(density)
            rows += [bench.sparse(name, density, vector) for name in ALGORITHMS if name in wanted]
        results.append({"elements": given.numel, "input": given.label, "rows": rows})
    if comm.rank == 0:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        about = {"hosts": comm.size, "rate": options.rate, "cores": os.cpu_count(), "load": os.getloadavg()[0]}
        options.output.write_text(json.dumps({**about, "results": results}, indent=1))


def table(read: dict[str, Any]) -> str:
    """The results as Markdown."""
    parts = []
    for result in read["results"]:
        rows = {row["name"]: row for row in result["rows"]}
        wire = 2 * (read["hosts"] - 1) / read["hosts"] * 32 * result["elements"] / bits_per_second(read["rate"])
        dense = rows.get("dense (Horovod)")
        if read["rate"] == MEMORY:
            where = f"{read['hosts']} ranks on one machine share its memory and its {read['cores']} cores"
            beside = ""
        else:
            where = f"{read['hosts']} hosts at {read['rate']} share {read['cores']} cores"
            times = f", {dense['seconds'] / wire:.2f} times as long" if dense else ""
            beside = (
                f" The bytes of `dense` take {wire:.3f} s on the wire alone, and it takes longer{times}, so the table "
                "also compares with that time, which no exchange of the dense gradient can beat."
            )
        parts.append(
            f"Input: {result['input']}. {where}, with one thread per rank; load {read['load']:.1f} at the end.{beside}"
        )
        head, lines = ["", "seconds", "baseline / this", "on a processor, all ranks, s"], []
        if wire:
            head += ["its bytes on the wire alone, s", "dense on the wire alone / this", "MB in"]
        for name, row in rows.items():
            against = rows.get("adapter: dense") if name.startswith("adapter") else dense
            ratio = f"{against['seconds'] / row['seconds']:.1f}x" if against else ""
            spread = f"{row['seconds']:.3f} ({min(row['all']):.3f} to {max(row['all']):.3f})"
            lines.append([name, spread, ratio, f"{row['busy']:.3f}"])
            if wire:
                own = 8 * row["bytes_in"] / bits_per_second(read["rate"])
                lines[-1] += [f"{own:.3f}", f"{wire / row['seconds']:.1f}x", f"{row['bytes_in'] / 1e6:.1f}"]
        parts.append(doc_sections.table(head, lines))
    return "\n\n".join(parts)


def main() -> None:
    options = arguments()
    if options.inside:
        inside(options)
        return
    emulated_network.run([__file__, "--inside", *sys.argv[1:]], options.hosts, options.rate)
    body = table(json.loads(options.output.read_text()))
    print(body)
    if options.section:
        what = options.network or "generated gradients"
        where = "on one machine" if options.rate == MEMORY else f"in the emulated network at {options.rate}"
        # The rows of whole steps are beside the others where --adapters is not empty.
        title = f"{'Whole steps of ' * bool(options.adapters)}{options.hosts} ranks {where}: {what}"
        doc_sections.write(doc_sections.RESULTS / "benchmarks.md", options.section, title, body)


if __name__ == "__main__":
    main()
