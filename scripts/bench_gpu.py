"""`make bench-gpu`: the time of encoding and decoding on this machine's GPU, relative to a device copy of the vector.

Times are device times between events, and medians of many runs after three that are not counted. Each run uses the next
of several inputs, so that no input is in the cache. A time includes the launches and the waiting of the host. It covers
everything that the adapter does with a gradient, including error feedback and the container.

    python scripts/bench_gpu.py --numel 25600000 --density 0.01
"""

from __future__ import annotations

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

from hvd_deepreduce import container as wire
from hvd_deepreduce.codec import RngKey
from hvd_deepreduce.config import Config
from hvd_deepreduce.ops import deferred, select
from hvd_deepreduce.pipeline import Pipeline

CONTAINERS = 4
KEY = RngKey(0, 0, 0)
console = Console(width=140)


def timed(function: Callable[[int], Any], inputs: int, runs: int) -> float:
    """The median milliseconds of ``function(i)``, where i is the number of the input."""
    times = []
    for run in range(runs + 3):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        function(run % inputs)
        end.record()
        end.synchronize()
        if run >= 3:
            times.append(cupy.cuda.get_elapsed_time(begin, end))
    return median(times)


def main(
    numel: Annotated[int, typer.Option(help="number of elements of the vector")] = 25_600_000,
    density: Annotated[float, typer.Option(help="density of top-k, in (0, 1]")] = 0.01,
    runs: Annotated[int, typer.Option(help="runs that are counted")] = 50,
    inputs: Annotated[int, typer.Option(help="number of input vectors, used in turn")] = 4,
) -> None:
    """Prints a Markdown table of the times."""
    random = cupy.random.default_rng(0)
    gradients = [random.standard_normal(numel, dtype=np.float32) for _ in range(inputs)]
    residuals = [cupy.zeros(numel, np.float32) for _ in range(inputs)]
    out, kept = cupy.empty(numel, np.float32), max(1, int(numel * density))
    tensors = [torch.from_dlpack(gradient) for gradient in gradients]

    topk = {"name": "topk", "density": density}
    rice = Pipeline(Config.load(sparsifier=topk, index="rice", value="qsgd"))
    bloom = Pipeline(Config.load(sparsifier=topk, index={"name": "bloom", "policy": "p0"}, value="raw"))
    gathered = cupy.concatenate([rice.encode(gradients[i % inputs], None, KEY) for i in range(CONTAINERS)])

    def decode(_: int) -> None:
        with deferred.reading(out):
            rice.decode(deferred.run_deferred(lambda: wire.split(gathered, CONTAINERS, numel)), out)

    def topk_of_torch(i: int) -> None:
        torch.topk(tensors[i].abs(), kept, sorted=False)
        torch.cuda.current_stream().synchronize()

    measured: list[tuple[str, Callable[[int], Any], float | None]] = [
        ("device copy", lambda i: cupy.copyto(out, gradients[i]), None),
        ("torch.topk of the magnitudes", topk_of_torch, None),
        ("accumulate, exact top-k", lambda i: select.topk(residuals[i], gradients[i], kept), None),
        ("encode: top-k, rice, qsgd", lambda i: rice.encode(gradients[i], residuals[i], KEY), 6.0),
        (f"decode and sum {CONTAINERS} containers", decode, 4.0),
        ("encode: top-k, Bloom p0, raw", lambda i: bloom.encode(gradients[i], residuals[i], KEY), 15.0),
    ]
    times = [timed(function, inputs, runs) for _, function, _ in measured]
    table = Table("operation", "ms", "time / copy", "aim", box=box.MARKDOWN)
    device = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    console.print(f"{device}, {numel:,} float32, density {density}, {date.today()}, commit {commit}")
    for (name, _, target), time in zip(measured, times, strict=True):
        table.add_row(name, f"{time:.3f}", f"{time / times[0]:.1f}x", f"{target:g}x" if target else "")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
