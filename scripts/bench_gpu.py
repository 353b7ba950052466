"""`make bench-gpu`: what the CUDA operations cost on the GPU at hand, beside a device copy of the same vector.

Device time by events, medians of many runs after three that are not counted; every run takes the next of several
inputs, so that none stands in the cache. A time includes what the host needs to launch and, where an operation must
know a size, to wait.

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

from hvd_deepreduce.backend import cuda

CONTAINERS = 4
KEY = (0, 0, 0)
FPR, HASHES = 0.001, 10
console = Console(width=140)


def timed(function: Callable[[int], Any], inputs: int, runs: int) -> float:
    """The median milliseconds of ``function(number of the input)``."""
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
    numel: Annotated[int, typer.Option(help="elements of the vector")] = 25_600_000,
    density: Annotated[float, typer.Option(help="share of elements to keep")] = 0.01,
    runs: Annotated[int, typer.Option(help="runs that are counted")] = 50,
    inputs: Annotated[int, typer.Option(help="vectors taken in turn")] = 4,
) -> None:
    """Prints a table in Markdown."""
    random = cupy.random.default_rng(0)
    gradients = [random.standard_normal(numel, dtype=np.float32) for _ in range(inputs)]
    residuals = [cupy.zeros(numel, np.float32) for _ in range(inputs)]
    out, kept = cupy.empty(numel, np.float32), max(1, int(numel * density))
    tensors = [torch.from_dlpack(gradient) for gradient in gradients]

    def encode(i: int) -> tuple[Any, Any, Any]:
        bad = cuda.nonfinite(gradients[i])
        indices, values = cuda.topk(residuals[i], gradients[i], kept)
        section, bits = cuda.rice_encode_start(indices, numel)
        norms, codes = cuda.qsgd_encode(values, 512, 63, False, *KEY, 0)
        packed = cuda.pack(codes, 7)
        size, _ = int(bits.get()[0]), bad
        return section[: (size + 7) // 8], norms, packed

    def bloom(i: int) -> Any:
        indices, _ = cuda.topk(residuals[i], gradients[i], kept)
        bits = cuda.bloom_insert(indices, int(1.44 * HASHES * kept / 8), HASHES, *KEY)
        support = cuda.bloom_query(bits, HASHES, numel, *KEY)
        return cuda.gather(residuals[i], support)

    containers = [encode(i % inputs) for i in range(CONTAINERS)]

    def decode(_: int) -> None:
        parts = []
        with cuda.one_verdict():
            for section, norms, packed in containers:
                codes = cuda.unpack(packed, kept, 7, np.uint8)
                parts.append((cuda.rice_decode(section, numel, kept), cuda.qsgd_decode(norms, codes, 512, 63)))
        cuda.sum_into(out, parts, 1.0)

    def topk_of_torch(i: int) -> None:
        torch.topk(tensors[i].abs(), kept, sorted=False)
        torch.cuda.current_stream().synchronize()

    measured: list[tuple[str, Callable[[int], Any], float | None]] = [
        ("device copy", lambda i: cupy.copyto(out, gradients[i]), None),
        ("torch.topk of the magnitudes", topk_of_torch, None),
        ("top-k, accumulated and exact", lambda i: cuda.topk(residuals[i], gradients[i], kept), None),
        ("encode: top-k, rice, qsgd", encode, 6.0),
        (f"decode and add {CONTAINERS} of them", decode, 4.0),
        ("encode: top-k, Bloom p0", bloom, 15.0),
    ]
    times = [timed(function, inputs, runs) for _, function, _ in measured]
    table = Table("what", "ms", "of a copy", "target", box=box.MARKDOWN)
    device = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    console.print(f"{device}, {numel:,} float32, density {density}, {date.today()}, commit {commit}")
    for (name, _, target), time in zip(measured, times, strict=True):
        table.add_row(name, f"{time:.3f}", f"{time / times[0]:.1f}x", f"{target:g}x" if target else "")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
