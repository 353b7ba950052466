"""`make bench-gpu`: the time of encoding and decoding on this machine's GPU, relative to a device copy of the vector.

Times are device times between events, and medians of many runs after three that are not counted. Each run uses the next
of several inputs, so that no input is in the cache. A time includes the launches and the waiting of the host. It covers
everything that the adapter does with a gradient, including error feedback and the container.

    python scripts/bench/bench_gpu.py --numel 25600000 --density 0.01
"""

import shutil
import subprocess
from collections.abc import Callable
from datetime import date
from statistics import median
from typing import Annotated, Any

import cupy
import numpy as np
import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.config import Config
from hvd_deepreduce.ops import select
from hvd_deepreduce.pipeline import Pipeline, bundle
from hvd_deepreduce.pipeline.bundle import Slice

RANKS = 4, 8
"""Whose containers are decoded and added up."""
SMALL = 1000
"""Elements of a vector that takes the GPU no time, so that its time is the host's."""
KEY = RngKey(0, 0, 0)
console = Console(width=140)


def timed(function: Callable[[int], object], inputs: int, runs: int) -> float:
    """The median milliseconds of ``function(i)``, where i is the number of the input."""
    times = []
    for run in range(runs + 3):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        function(run % inputs)
        end.record()
        end.synchronize()
        if run >= 3:
            times.append(float(cupy.cuda.get_elapsed_time(begin, end)))
    return median(times)


def main(
    numel: Annotated[int, typer.Option(help="number of elements of the vector")] = 25_600_000,
    density: Annotated[float, typer.Option(help="density of top-k, in (0, 1]")] = 0.01,
    runs: Annotated[int, typer.Option(help="runs that are counted")] = 50,
    inputs: Annotated[int, typer.Option(help="number of input vectors, used in turn")] = 4,
) -> None:
    """Prints a Markdown table of the times."""
    random = cupy.random.default_rng(0)
    topk = {"name": "topk", "density": density}
    rice = Pipeline(Config.load(sparsifier=topk, index="rice_blocks", value="qsgd"))
    bloom = Pipeline(Config.load(sparsifier=topk, index={"name": "bloom", "policy": "p0"}, value="raw"))
    rans = Pipeline(Config.load(sparsifier=topk, index="rans", value="raw"))

    def vectors(size: int) -> tuple[list[Any], list[Any]]:
        """Gradients and residuals."""
        made = [random.standard_normal(size, dtype=np.float32) for _ in range(inputs)]
        return made, [cupy.zeros(size, np.float32) for _ in made]

    def encode(pipeline: Pipeline, size: int) -> Callable[[int], object]:
        given, kept_back = vectors(size)
        slices = [Slice(pipeline, (0, size), KEY)]
        return lambda i: bundle.encode(given[i], kept_back[i], None, slices, 2, False)

    def decode(pipeline: Pipeline, size: int, ranks: int) -> Callable[[int], object]:
        given, _ = vectors(size)
        slices, total = [Slice(pipeline, (0, size), KEY)], cupy.empty(size, np.float32)
        sent = [bundle.encode(given[i % inputs], None, None, slices, 2, False) for i in range(ranks)]
        gathered = cupy.concatenate(sent)
        return lambda i: bundle.sum_into(total, gathered, ranks, slices, 1.0)

    gradients, residuals = vectors(numel)
    out, kept = cupy.empty(numel, np.float32), max(1, int(numel * density))
    tensors: list[Any] = [torch.utils.dlpack.from_dlpack(gradient) for gradient in gradients]

    def topk_of_torch(i: int) -> None:
        torch.topk(tensors[i].abs(), kept, sorted=False)
        torch.cuda.current_stream().synchronize()

    # The third is the most that it may take: times a device copy, or microseconds of the host.
    measured: list[tuple[str, Callable[[int], object], float | None]] = [
        ("device copy", lambda i: cupy.copyto(out, gradients[i]), None),
        ("torch.topk of the magnitudes", topk_of_torch, None),
        ("accumulate, exact top-k", lambda i: select.topk(residuals[i], gradients[i], kept), None),
        ("encode: top-k, rice_blocks, qsgd", encode(rice, numel), 4.0),
        *[(f"decode and sum of {ranks} ranks", decode(rice, numel, ranks), 3.0 * ranks / 4) for ranks in RANKS],
        ("encode: top-k, Bloom p0, raw", encode(bloom, numel), 8.0),
        ("encode: top-k, rANS, raw", encode(rans, numel), None),
    ]
    on_host: list[tuple[str, Callable[[int], object], float | None]] = [
        ("host: encode", encode(rice, SMALL), 150.0),
        *[(f"host: decode and sum of {ranks} ranks", decode(rice, SMALL, ranks), 150.0) for ranks in RANKS],
    ]
    times = [timed(function, inputs, runs) for _, function, _ in measured]
    table = Table("operation", "ms", "time / copy", "aim", box=box.MARKDOWN)
    device = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    commit = ""
    if shutil.which("git"):
        ended = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
        commit = ended.stdout.strip() and f", commit {ended.stdout.strip()}"
    console.print(f"{device}, {numel:,} float32, density {density}, {date.today()}{commit}")
    for (name, _, most), time in zip(measured, times, strict=True):
        table.add_row(name, f"{time:.3f}", f"{time / times[0]:.1f}x", f"{most:g}x" if most else "")
    for name, function, most in on_host:
        table.add_row(name, f"{timed(function, inputs, runs):.3f}", "", f"{most:g} us")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
