"""`make bench-gpu`: what compression takes on this machine's GPU.

    python scripts/bench/bench_gpu.py --show operations --numel 25600000 --density 0.01

``--show`` may be given several times:

    operations  encoding and decoding, relative to a device copy of the vector. Times are device times between events,
                and medians of many runs after three that are not counted. Each run uses the next of several inputs, so
                that no input is in the cache. A time includes the launches and the waiting of the host. It covers
                everything that the adapter does with a gradient, including error feedback and the container.
    steps       whole steps of DDP on one rank, whose hook sends nothing: the difference to a step without the hook is
                what encoding and decoding add.
    single      operations of codecs that the pipelines above do not call, each by itself.
    kernels     how often a call launches each kernel, how long the kernels run, and what the host takes.
    ncu         one encode and one decode between cudaProfilerStart and cudaProfilerStop, after as many that compile the
                kernels: for ncu --profile-from-start off.
"""

import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from datetime import date
from enum import Enum
from statistics import median
from typing import Annotated, Any

import cupy
import numpy as np
import torch
import torch.distributed as dist
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.config import Config
from hvd_deepreduce.ops import curve_fit, deferred, huffman, rans, rotation, sections, select, sort
from hvd_deepreduce.pipeline import Pipeline, bundle
from hvd_deepreduce.pipeline.bundle import Slice
from hvd_deepreduce.torch import ddp

RANKS = 4, 8
"""Whose containers are decoded and added up."""
SMALL = 1000
"""Elements of a vector that takes the GPU no time, so that its time is the host's."""
MANY_RANKS, MANY_TENSORS = 64, 161
"""Of the containers whose headers are read: ResNet-50's tensors."""
KEY = RngKey(0, 0, 0)
TRANSFORMERS = (6, 512, 6000), (12, 768, 32_000)
"""Layers, width and words: 25 and 134 million parameters."""
JOBS: dict[str, dict[str, Any] | None] = {
    "DDP without a hook": None,
    "signs": {"memory": "scaled_momentum", "value": "sign", "scope": "bucket"},
    "top-k, DGC's momentum": {"memory": "dgc", "scope": "bucket"},
}
WARM_UP, COUNTED = 4, 10
"""Steps of each job."""
PROFILED: dict[str, dict[str, Any]] = {
    "default": {},
    "signs": {"memory": "scaled_momentum", "value": "sign"},
    "Bloom": {"index": {"name": "bloom", "policy": "p0"}, "value": "raw"},
}
PROFILED_SIZE = 1_000_000
"""Elements of a bucket, whose calls the host may hold up. The kernels of ``--numel`` elements are shown too."""
Call = Callable[[int], object]
"""Of the number of an input."""
console = Console(width=140)


class Show(str, Enum):
    operations = "operations"
    steps = "steps"
    single = "single"
    kernels = "kernels"
    ncu = "ncu"


def timed(function: Call, inputs: int, runs: int) -> float:
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


def pipeline_of(density: float, **codecs: Any) -> Pipeline:
    return Pipeline(Config.load(sparsifier={"name": "topk", "density": density}, **codecs))


def vectors(size: int, inputs: int) -> list[Any]:
    random = cupy.random.default_rng(0)
    return [random.standard_normal(size, dtype=np.float32) for _ in range(inputs)]


def encode(pipeline: Pipeline, size: int, inputs: int) -> Call:
    given, slices = vectors(size, inputs), [Slice(pipeline, (0, size), KEY)]
    residuals = [cupy.zeros(size, np.float32) for _ in given]
    velocities = [cupy.zeros(size, np.float32) if pipeline.config.has_velocity else None for _ in given]
    return lambda i: bundle.encode(given[i], residuals[i], velocities[i], slices, 2, False)


def decode(pipeline: Pipeline, size: int, ranks: int, inputs: int) -> Call:
    one, slices, total = encode(pipeline, size, inputs), [Slice(pipeline, (0, size), KEY)], cupy.empty(size, np.float32)
    gathered = cupy.concatenate([one(rank % inputs) for rank in range(ranks)])
    return lambda i: bundle.sum_into(total, gathered, ranks, slices, 1.0)


def operations(numel: int, density: float, runs: int, inputs: int) -> None:
    rice = pipeline_of(density, index="rice_blocks", value="qsgd")
    bloom = pipeline_of(density, index={"name": "bloom", "policy": "p0"}, value="raw")
    rans = pipeline_of(density, index="rans", value="raw")
    gradients, residuals = vectors(numel, inputs), [cupy.zeros(numel, np.float32) for _ in range(inputs)]
    out, kept = cupy.empty(numel, np.float32), max(1, int(numel * density))
    tensors: list[Any] = [torch.utils.dlpack.from_dlpack(gradient) for gradient in gradients]

    def topk_of_torch(i: int) -> None:
        torch.topk(tensors[i].abs(), kept, sorted=False)
        torch.cuda.current_stream().synchronize()

    # The third is the most that it may take: times a device copy, or microseconds of the host.
    measured: list[tuple[str, Call, float | None]] = [
        ("device copy", lambda i: cupy.copyto(out, gradients[i]), None),
        ("torch.topk of the magnitudes", topk_of_torch, None),
        ("accumulate, exact top-k", lambda i: select.topk(residuals[i], gradients[i], kept), None),
        ("encode: top-k, rice_blocks, qsgd", encode(rice, numel, inputs), 4.0),
        *[(f"decode and sum of {n} ranks", decode(rice, numel, n, inputs), 3.0 * n / 4) for n in RANKS],
        ("encode: top-k, Bloom p0, raw", encode(bloom, numel, inputs), 8.0),
        ("encode: top-k, rANS, raw", encode(rans, numel, inputs), None),
    ]
    on_host: list[tuple[str, Call, float | None]] = [
        ("host: encode", encode(rice, SMALL, inputs), 150.0),
        *[(f"host: decode and sum of {n} ranks", decode(rice, SMALL, n, inputs), 150.0) for n in RANKS],
    ]
    times = [timed(function, inputs, runs) for _, function, _ in measured]
    table = Table("operation", "ms", "time / copy", "aim", box=box.MARKDOWN)
    for (name, _, most), taken in zip(measured, times, strict=True):
        table.add_row(name, f"{taken:.3f}", f"{taken / times[0]:.1f}x", f"{most:g}x" if most else "")
    for name, function, most in on_host:
        table.add_row(name, f"{timed(function, inputs, runs):.3f}", "", f"{most:g} us")
    console.print(f"{numel:,} float32, density {density}")
    console.print(table)


def transformer(layers: int, width: int, words: int, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    blocks = [
        nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, batch_first=True, norm_first=True)
        for _ in range(layers)
    ]
    return nn.Sequential(nn.Embedding(words, width), *blocks, nn.Linear(width, words, bias=False)).to(device)


def step_of(model: nn.Module, state: ddp.DeepReduceState | None, x: torch.Tensor) -> Callable[[], object]:
    called = DistributedDataParallel(model, bucket_cap_mb=25)
    if state is not None:
        called.register_comm_hook(state, ddp.deepreduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(x.device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(called(x).flatten(0, 1), x.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def steps(device: torch.device, shapes: tuple[tuple[int, int, int], ...] = TRANSFORMERS) -> None:
    """The jobs take turns, so that the clocks and other load are the same for all."""
    backend = "cpu:gloo,cuda:nccl" if dist.is_nccl_available() else "gloo"
    dist.init_process_group(backend, init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    table = Table("parameters", "job", "ms a step", "range", "to the first", box=box.MARKDOWN)
    for shape in shapes:
        x = torch.randint(shape[2], (8, 512), device=device)
        states = {name: None if config is None else ddp.DeepReduceState(config) for name, config in JOBS.items()}
        models = {name: transformer(*shape, device) for name in JOBS}
        jobs = {name: step_of(models[name], states[name], x) for name in JOBS}
        times: dict[str, list[float]] = {name: [] for name in jobs}
        for _ in range(WARM_UP + COUNTED):
            for name, step in jobs.items():
                torch.cuda.synchronize()
                begin = time.perf_counter()
                step()
                torch.cuda.synchronize()
                times[name].append(1e3 * (time.perf_counter() - begin))
        numel, first = sum(one.numel() for one in models[next(iter(models))].parameters()), 0.0
        for name, all_times in times.items():
            counted = all_times[WARM_UP:]
            first = first or median(counted)
            between = f"{min(counted):.2f}-{max(counted):.2f}"
            more = f"{median(counted) - first:+.2f} ms"
            table.add_row(f"{numel / 1e6:.1f} M", name, f"{median(counted):.2f}", between, more)
        for state in states.values():
            if state:
                state.close()
        del jobs, models, states
        torch.cuda.empty_cache()
    dist.destroy_process_group()
    console.print(f"Steps of DDP in bfloat16, one rank, {backend}, medians of {COUNTED} after {WARM_UP}")
    console.print(table)


def microseconds(call: Call, inputs: int, runs: int) -> tuple[float, float]:
    """The medians of the host's time until ``call`` returns, and of the time until the GPU is done."""
    host, whole = [], []
    for run in range(runs + 3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call(run % inputs)
        returned = time.perf_counter()
        torch.cuda.synchronize()
        if run >= 3:
            host.append(1e6 * (returned - begin))
            whole.append(1e6 * (time.perf_counter() - begin))
    return median(host), median(whole)


def kernels_of(call: Call, inputs: int, runs: int) -> Mapping[str, tuple[float, float]]:
    """(launches, microseconds) a call of each kernel, copy and fill of memory; those that take longest come first."""
    found: dict[str, tuple[int, float]] = {}
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for run in range(runs):
            call(run % inputs)
        torch.cuda.synchronize()
    for event in profiled.events():
        if event.device_type.name == "CUDA":
            launches, taken = found.get(event.name, (0, 0.0))
            found[event.name] = launches + 1, taken + event.device_time_total
    longest = sorted(found.items(), key=lambda one: -one[1][1])
    return {name: (launches / runs, taken / runs) for name, (launches, taken) in longest}


def kernels(numel: int, density: float, runs: int, inputs: int) -> None:
    for name, config in PROFILED.items():
        for size in (numel, PROFILED_SIZE):
            pipeline = pipeline_of(density, **config)
            calls = {
                "encode": encode(pipeline, size, inputs),
                f"decode and sum of {RANKS[0]} ranks": decode(pipeline, size, RANKS[0], inputs),
            }
            for what, call in calls.items():
                host, whole = microseconds(call, inputs, runs)
                found = kernels_of(call, inputs, min(runs, 5))
                table = Table("kernel", "launches a call", "us a call", box=box.MARKDOWN)
                for kernel, (launches, taken) in found.items():
                    table.add_row(escape(kernel[:80]), f"{launches:g}", f"{taken:.1f}")
                total = sum(taken for _, taken in found.values())
                table.add_row("total", f"{sum(launches for launches, _ in found.values()):g}", f"{total:.1f}")
                console.print(f"{name}, {size:,} float32, density {density}, {what}:")
                console.print(f"the host returns after {host:.0f} us, all is done after {whole:.0f} us")
                console.print(table)


def short_containers(numel: int, density: float) -> tuple[int, Any]:
    """The elements of a tensor, and the containers of ``MANY_RANKS`` times ``MANY_TENSORS`` of them."""
    each = max(1, numel // MANY_TENSORS)
    kept = max(1, int(each * density))
    numbers = [kept, 9 * kept // 8, -(-kept // 2)]  # the bytes of gaps, and of values in 4 bits
    one = bytes([0, 0, 0, 0, 32 + 1]) + b"".join(map(sections.varint, numbers)) + bytes(sum(numbers[1:]))
    return each, cupy.asarray(np.tile(np.frombuffer(one, np.uint8), MANY_RANKS * MANY_TENSORS))


def single(numel: int, density: float, runs: int) -> None:
    random, kept = np.random.default_rng(0), max(2, int(numel * density))
    chosen = np.sort(random.choice(numel, kept, replace=False)).astype(np.uint32)
    values = random.standard_normal(kept, dtype=np.float32)
    indices, shuffled, there = cupy.asarray(chosen), cupy.asarray(random.permutation(chosen)), cupy.asarray(values)
    ordered = cupy.asarray(np.sort(values)[::-1].copy())
    codes = cupy.asarray(np.minimum(random.geometric(0.05, kept), 255).astype(np.uint8))
    of_rans, of_huffman = rans.encode_indices(indices), huffman.encode(codes)
    rotated = rotation.rotate(there, 2**31, 0, 0, 0)
    dense, width = cupy.asarray(random.standard_normal(numel, dtype=np.float32)), (numel - 1).bit_length()
    each, containers = short_containers(numel, density)

    def topk_of_chunks(chunk: int) -> Call:
        last = numel % chunk or chunk
        k, of_last = max(1, int(chunk * density)), max(1, int(last * density))
        return lambda _: select.topk_of_chunks(dense, None, chunk, k, of_last)

    def heads(_: int) -> None:
        with deferred.reading(containers):
            sections.prefetch_short_headers(containers, MANY_RANKS, [each] * MANY_TENSORS, 4)

    calls: dict[str, Call] = {
        "sort by value": lambda _: sort.by_value(there),
        "sort by index": lambda _: sort.by_index(shuffled, width),
        "fit_dexp: encode": lambda _: curve_fit.fit_dexp_encode(ordered),
        "fit_poly: encode, 4 segments": lambda _: curve_fit.fit_poly_encode(ordered, 5, 4),
        "fit_poly: encode, 200 segments": lambda _: curve_fit.fit_poly_encode(ordered, 1, 200),
        "rANS: encode indices": lambda _: rans.encode_indices(indices),
        "rANS: decode indices": lambda _: rans.decode_indices(of_rans, numel, kept),
        "Huffman: decode": lambda _: huffman.decode(of_huffman, kept),
        "rotate, one bucket": lambda _: rotation.rotate(there, 2**31, 0, 0, 0),
        "rotate back": lambda _: rotation.unrotate(rotated, kept, 2**31, 0, 0, 0),
        "rotate all elements, buckets of 1,024": lambda _: rotation.rotate(dense, 1024, 0, 0, 0),
        "top-k of chunks of 4,096": topk_of_chunks(4096),
        "top-k of chunks of 65,536": topk_of_chunks(65_536),
        f"headers of {MANY_RANKS} ranks x {MANY_TENSORS} tensors": heads,
    }
    table = Table("operation", "launches", "GPU, us", "whole call, us", box=box.MARKDOWN)
    for name, call in calls.items():
        _, whole = microseconds(call, 1, runs)
        found = kernels_of(call, 1, min(runs, 5)).values()
        launches, taken = (sum(numbers) for numbers in zip(*found, strict=True))
        table.add_row(name, f"{launches:g}", f"{taken:.1f}", f"{whole:.0f}")
    console.print(f"{kept:,} kept elements of {numel:,}")
    console.print(table)


def ncu(numel: int, density: float) -> None:
    pipeline = pipeline_of(density)
    calls = encode(pipeline, numel, 2), decode(pipeline, numel, RANKS[0], 2)
    for call in calls:
        call(0)
    torch.cuda.synchronize()
    with torch.cuda.profiler.profile():
        for call in calls:
            call(1)
        torch.cuda.synchronize()


def main(
    show: Annotated[list[Show] | None, typer.Option(help="operations and steps, if none is given")] = None,
    numel: Annotated[int, typer.Option(help="number of elements of the vector")] = 25_600_000,
    density: Annotated[float, typer.Option(help="density of top-k, in (0, 1]")] = 0.01,
    runs: Annotated[int, typer.Option(help="runs that are counted")] = 50,
    inputs: Annotated[int, typer.Option(help="number of input vectors, used in turn")] = 4,
) -> None:
    """Prints Markdown tables of the times."""
    asked = show or [Show.operations, Show.steps]
    device = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    commit = ""
    if shutil.which("git"):
        ended = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
        commit = ended.stdout.strip() and f", commit {ended.stdout.strip()}"
    console.print(f"{device}, {date.today()}{commit}")
    if Show.operations in asked:
        operations(numel, density, runs, inputs)
    if Show.steps in asked:
        steps(torch.device("cuda"))
    if Show.single in asked:
        single(numel, density, runs)
    if Show.kernels in asked:
        kernels(numel, density, runs, inputs)
    if Show.ncu in asked:
        ncu(numel, density)


if __name__ == "__main__":
    typer.run(main)
