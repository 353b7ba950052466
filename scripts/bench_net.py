#!/usr/bin/env python3
"""Table II of the DenseStream paper, in the laboratory: the time to synchronize one step's gradient over slow links.

    scripts/bench_net.py --hosts 4 --rate 1gbit --numel 24000000 --density 0.01,0.05,0.1

The script creates the laboratory, runs itself on each host and removes the laboratory. It times what the paper times:
from the end of the backward pass (each rank has a dense gradient) to the dense sum on each rank, including
accumulation, top-k, exchange and decompression. A reported time is that of the slowest rank, and the median over the
repetitions.

Real gradients give better figures: use --gradient FILE.npz with arrays gradient_0, gradient_1, ...
(scripts/capture_gradients.py writes such files), or --gradient 'FILE.{rank}.npy' with one file per rank. Without
--gradient, the gradients are generated: normal values, scaled by lognormal factors for runs of 4096, 256 and 16
elements. All ranks have the same factors, so that large values are clustered and overlap between ranks about as much as
the paper reports.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4, help="number of hosts, one rank each")
    parser.add_argument("--rate", default="1gbit", help="rate of each link, as in 1gbit or 100mbit")
    parser.add_argument("--numel", default="24000000,134000000", help="comma-separated lengths of generated gradients")
    parser.add_argument(
        "--gradient", action="append", default=[],
        help="a .npz or .npy file of gradients, repeatable; {rank} is replaced by the number of the rank",
    )  # fmt: skip
    parser.add_argument("--density", default="0.01,0.05,0.1", help="comma-separated densities")
    parser.add_argument("--only", default="", help="comma-separated names of the algorithms to run; default: all")
    parser.add_argument("--repeat", type=int, default=5, help="repetitions that are counted")
    parser.add_argument("--output", type=Path, default=Path("runs/bench_net.json"), help="JSON file for the results")
    parser.add_argument("--profile", action="store_true", help="rank 0 prints the time of each part of a step")
    parser.add_argument(
        "--priority", type=int, default=0,
        help="scheduling priority of the ranks over other work on this machine, 0 to 20 (needs root)",
    )  # fmt: skip
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def generated(numel: int, rank: int) -> np.ndarray:
    """A gradient with clusters. All ranks have the same scales and different values."""
    shared, own = np.random.default_rng(1), np.random.default_rng(100 + rank)
    out = own.standard_normal(numel, dtype=np.float32)
    for run, sigma in ((4096, 0.8), (256, 0.6), (16, 0.6)):
        scale = np.exp(sigma * shared.standard_normal(-(-numel // run), dtype=np.float32))
        whole = numel // run * run
        out[:whole].reshape(-1, run)[:] *= scale[: numel // run, None]
        out[whole:] *= scale[-1]
    return out


def captured(source: str, rank: int) -> np.ndarray:
    """The gradient of a rank, from a file."""
    read = np.load(source.format(rank=rank))
    if isinstance(read, np.ndarray):
        return read.astype(np.float32).ravel()
    with read:
        count = sum(name.startswith("gradient_") for name in read.files)
        return read[f"gradient_{rank % count}"].astype(np.float32).ravel()


def received_bytes() -> int:
    """The number of bytes that this host has received over its link so far."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("e0:"):
            return int(line.split(":")[1].split()[0])
    return 0


class Bench:
    """Times all algorithms on one vector."""

    def __init__(self, gradient: np.ndarray, options: argparse.Namespace) -> None:
        from mpi4py import MPI

        self.comm, self.options = MPI.COMM_WORLD, options
        self.gradient = gradient
        self.residual, self.out = np.zeros_like(gradient), np.zeros_like(gradient)

    def time(self, name: str, step, repeat: int) -> dict:
        from mpi4py import MPI

        times, bytes_in = [], []
        for _ in range(repeat + 1):
            self.residual.fill(0)
            self.comm.Barrier()
            at, before = time.perf_counter(), received_bytes()
            step()
            times.append(self.comm.allreduce(time.perf_counter() - at, MPI.MAX))
            bytes_in.append(self.comm.allreduce(received_bytes() - before, MPI.MAX))
        row = {"name": name, "seconds": float(np.median(times[1:])), "all": times, "bytes_in": int(np.median(bytes_in))}
        if self.comm.rank == 0:
            print(f"  {name:28s} {row['seconds']:8.3f} s  {row['bytes_in'] / 1e6:9.1f} MB in", flush=True)
        return row

    def dense(self) -> dict:
        import horovod.torch as hvd
        import torch

        hvd.init()
        tensor = torch.from_numpy(self.out)

        def step() -> None:
            self.out[:] = self.gradient
            hvd.allreduce_(tensor, op=hvd.Average, name="dense")

        row = self.time("dense (Horovod)", step, min(self.options.repeat, 3))
        hvd.shutdown()  # its background thread asks all ranks for work every millisecond
        return row

    def sparse(self, name: str, density: float, **settings) -> dict:
        from hvd_deepreduce.exchange import densestream, sparcml, topk_allgather
        from hvd_deepreduce.joint.densestream import DenseStream
        from hvd_deepreduce.ops import select
        from hvd_deepreduce.sparse import SparseTensor

        modules = {"TopkA": topk_allgather, "TopkDA": sparcml}
        allreduce = modules.get(name, densestream).allreduce
        if name not in modules:
            settings = {"codec": DenseStream(**settings)}
        kept = max(1, int(density * self.gradient.size))
        spent = {"top-k": 0.0, "exchange": 0.0, "exchange, own CPU": 0.0}

        def step() -> None:
            at = time.perf_counter()
            indices, values = select.topk(self.residual, self.gradient, kept)
            tensor = SparseTensor(self.gradient.size, indices, values)
            spent["top-k"] += time.perf_counter() - at
            at, cpu_at = time.perf_counter(), time.process_time()
            mean = 1 / self.comm.size
            allreduce(self.comm, tensor, out=self.out, scale=mean, residual=self.residual, timeout=120, **settings)
            spent["exchange"] += time.perf_counter() - at
            spent["exchange, own CPU"] += time.process_time() - cpu_at

        row = self.time(f"{name} {density:.0%}", step, self.options.repeat)
        row["spent"] = {part: seconds / (self.options.repeat + 1) for part, seconds in spent.items()}
        if self.options.profile and self.comm.rank == 0:
            print("   ", {part: round(seconds, 3) for part, seconds in row["spent"].items()}, flush=True)
        return row


def volumes(gradient: np.ndarray, density: float) -> dict[str, float]:
    """Table I: bytes of the stream of rank 0, relative to key-value pairs."""
    from hvd_deepreduce.codec import RngKey
    from hvd_deepreduce.joint.densestream import DenseStream
    from hvd_deepreduce.ops import select

    kept = max(1, int(density * gradient.size))
    indices, values = select.topk(np.zeros_like(gradient), gradient, kept)
    return {
        name: codec.encode(indices, values, gradient.size, RngKey(0, 0, 0))[0].size / (8 * kept)
        for name, codec in {"plain": DenseStream(coded=False), "coded": DenseStream(coded=True)}.items()
    }


def inside(options: argparse.Namespace) -> None:
    """The program of one rank."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    if options.priority:
        # Linux divides the cores between sessions (autogroups); a nice value has an effect only within a session.
        Path("/proc/self/autogroup").write_text(str(-options.priority))
    results = []
    for source in options.gradient or [int(n) for n in options.numel.split(",")]:
        if isinstance(source, int):
            gradient, label = generated(source, comm.rank), "generated"
        else:
            gradient, label = captured(source, comm.rank), source
        if comm.rank == 0:
            print(f"{gradient.size} elements, {label}", flush=True)
        bench = Bench(gradient, options)
        algorithms = {
            "TopkA": {},
            "TopkDA": {},
            "DSA": {"coded": False},
            "DSA coded": {"coded": True},
            "DSA coded float16": {"coded": True, "value": "float16"},
            "DSA coded qsgd": {"coded": True, "value": "qsgd"},
        }
        wanted = options.only.split(",") if options.only else ["dense", *algorithms]
        rows = [bench.dense()] if "dense" in wanted else []
        table_1 = {}
        for density in map(float, options.density.split(",")):
            table_1[f"{density:.0%}"] = ratios = volumes(gradient, density)
            if comm.rank == 0:
                print(f"  stream relative to key-value at {density:.0%}: plain {ratios['plain']:.2f}, "
                      f"coded {ratios['coded']:.2f}", flush=True)  # fmt: skip
            rows += [bench.sparse(name, density, **algorithms[name]) for name in algorithms if name in wanted]
        results.append({"elements": gradient.size, "gradient": label, "volumes": table_1, "rows": rows})
    if comm.rank == 0:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        about = {"hosts": comm.size, "rate": options.rate, "cores": os.cpu_count(), "load": os.getloadavg()[0]}
        options.output.write_text(json.dumps({**about, "results": results}, indent=1))


def table(path: Path) -> str:
    """The results as Markdown tables."""
    read = json.loads(path.read_text())
    lines = []
    for result in read["results"]:
        rows = {row["name"]: row for row in result["rows"]}
        dense = rows.get("dense (Horovod)")
        lines += [
            "",
            f"{result['elements']:,} elements ({result['gradient']}), {read['hosts']} hosts at {read['rate']}, "
            f"which share {read['cores']} cores",
            "",
            "| | seconds | speed-up over dense | MB received per rank |",
            "| --- | --- | --- | --- |",
        ]
        for name, row in rows.items():
            ratio = f"{dense['seconds'] / row['seconds']:.1f}x" if dense else ""
            lines.append(f"| {name} | {row['seconds']:.3f} | {ratio} | {row['bytes_in'] / 1e6:.1f} |")
        lines += ["", "| volume relative to key-value | plain | coded |", "| --- | --- | --- |"]
        lines += [f"| {d} | {v['plain']:.2f} | {v['coded']:.2f} |" for d, v in result["volumes"].items()]
    return "\n".join(lines)


def main() -> None:
    options = arguments()
    if options.inside:
        inside(options)
        return
    netlab = str(ROOT / "scripts" / "netlab")
    subprocess.run([netlab, "up", str(options.hosts), options.rate], check=True)
    try:
        # One thread per rank, because the hosts share the cores of this machine.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [netlab, "run", "mpirun", "-np", str(options.hosts), "-x", "OMP_NUM_THREADS"]
        command += [sys.executable, __file__, "--inside", *sys.argv[1:]]
        subprocess.run(command, check=True, env=environment)
    finally:
        subprocess.run([netlab, "down"], check=True)
    print(table(options.output))


if __name__ == "__main__":
    main()
