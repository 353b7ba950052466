"""`make bench`: measures the time and the size of every codec on one thread, and writes docs/results/benchmarks.md.

Every time is the median of several runs; a first run is not counted. Where a table has ratios to a copy, the copy of
the dense vector with NumPy is timed in turn with the function, so that the ratio does not depend on the speed of the
machine. Each section can be run alone:

    python scripts/bench/bench.py --only pipeline --only indices
"""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("dev", "train"))

import bench_inputs
import captured
import doc_sections
import numpy as np
import typer
from bench_inputs import described, random_subset, vector
from doc_sections import RESULTS, ROOT, table
from history import total
from rich.console import Console
from step_times import Difference

from hvd_deepreduce import Config
from hvd_deepreduce.codecs.interfaces import U8, ValueCodec
from hvd_deepreduce.ops import heap, library, select
from hvd_deepreduce.pipeline import Pipeline, bundle
from hvd_deepreduce.tools.measuring import KEY, all_codecs, entropy_bits, timed, trial
from hvd_deepreduce.tools.picture import Panel, Point, draw
from hvd_deepreduce.wire import standalone as wire

DOC = RESULTS / "benchmarks.md"
LARGE, SMALL = 25_600_000, 36_864
DENSITIES = (0.001, 0.01, 0.1)
console = Console(width=140)


def small_timed(function: Callable[[], Any]) -> float:
    """The median seconds of a call that takes microseconds."""
    function()
    batches = []
    for _ in range(15):
        begin = time.perf_counter()
        for _ in range(20):
            function()
        batches.append((time.perf_counter() - begin) / 20)
    return median(batches)


def layer(kind: str) -> captured.Vector:
    """The first 3x3 convolution of ResNet-50's first stage: 64 x 64 x 3 x 3 = 36,864 elements, of a job that selects
    1% from each tensor."""
    of_all = vector(kind, 0.01, selection="tensor")
    names, sizes = captured.parameters(captured.path(bench_inputs.NETWORK, 0.01, "tensor"))
    end = int(np.cumsum(sizes)[names.index("4.body.3.weight")])
    return of_all[end - SMALL : end].copy()


def pipeline_section() -> Iterator[str | None]:
    """The recommended config on 25.6 M elements, compared with a copy and with torch.topk."""
    import torch

    torch.set_num_threads(1)
    generator = np.random.default_rng(0)
    gradient = generator.standard_normal(LARGE, dtype=np.float32)
    gradient *= np.exp(generator.standard_normal(LARGE, dtype=np.float32))
    residuals, out = [np.zeros_like(gradient), np.zeros_like(gradient)], np.zeros_like(gradient)
    pipeline = Pipeline(Config.load("recommended"), threads=1)
    slices = [bundle.Slice(pipeline, (0, LARGE), KEY)]
    heap.keep_freed()  # as in a job

    def encode_in_a_step() -> U8:
        packed = bundle.encode(gradient, residuals[0], None, slices, 4, False, residuals[1])
        residuals.reverse()
        return packed

    containers = [encode_in_a_step() for _ in range(4)]
    message = np.concatenate(containers)
    copy, encode, decoded = timed(
        lambda: np.copyto(out, gradient), encode_in_a_step, lambda: bundle.sum_into(out, message, 4, slices, 0.25)
    )
    tensor = torch.from_numpy(gradient)
    copy2, topk = timed(lambda: np.copyto(out, gradient), lambda: tensor.abs().topk(LARGE // 100), runs=3)
    yield (
        "Input: 25.6 M generated float32 (normal x lognormal) in each step, top 1%, rice_blocks, 7-bit QSGD, with "
        f"error feedback. Baseline: copying the vector, {1000 * copy:.1f} ms. The encoder and the decoder alone: no "
        f"framework and no exchange. A container has {containers[0].nbytes:,} bytes, "
        f"{containers[0].nbytes / gradient.nbytes:.2%} of dense."
    )
    yield table(
        ["one thread", "ms", "time / copy", "aim", "least traffic / copy"],
        [
            ["encode: accumulate, check, exact top-k, rice_blocks, QSGD, subtract what is sent", f"{1000 * encode:.1f}",
             f"{encode / copy:.2f}", "1.7", "1.5"],
            ["decode and sum 4 containers", f"{1000 * decoded:.1f}", f"{decoded / copy:.2f}", "0.7", "0.5"],
            ["torch.topk of the magnitudes alone", f"{1000 * topk:.0f}", f"{topk / copy2:.1f}", "", ""],
        ],
    )  # fmt: skip


def indices_section() -> Iterator[str | None]:
    """Every lossless index codec on random subsets: size relative to the entropy, and speed."""
    rows = []
    for density in DENSITIES:
        count = int(LARGE * density)
        indices = random_subset(LARGE, count)
        entropy = entropy_bits(LARGE, count)
        for kind, name, codec in all_codecs():
            if kind != "index" or name == "bloom":
                continue
            tried = trial(codec, indices, np.ones(count, np.float32), LARGE)
            encode, decode = timed(tried.encode, tried.decode, runs=5)
            bits = 8 * tried.size
            rows.append(
                [name, f"{density:.1%}", f"{bits / count:.3f}", f"{entropy / count:.3f}", f"{bits / entropy:.4f}",
                 f"{count / encode / 1e6:.0f}", f"{count / decode / 1e6:.0f}"]
            )  # fmt: skip
    yield table(
        ["index codec", "density", "bits / kept", "entropy", "bits / entropy", "encode M kept/s", "decode M kept/s"],
        rows,
    )


def inputs_section() -> Iterator[str | None]:
    """What the input changes: raw gradients, accumulators, generated and random supports."""
    densities = (0.001, 0.01, 0.05, 0.1)
    head, *rows = bench_inputs.rows(densities)
    yield None
    yield (
        f"Accumulators and raw gradients are those of one job for each density; that of 1%: "
        f"{described('accumulator', 0.01)}. Generated clusters are those of bench_net.py."
    )
    yield table(head, rows)


def codecs_section() -> Iterator[str | None]:
    """Every codec on captured vectors: bits, time and error, as tables and as a figure."""
    yield None
    points: dict[str, list[Point]] = {"index": [], "value": [], "joint": []}
    for title, kind, selection, densities in (
        ("One layer, with error feedback", "accumulator", "tensor", (0.01,)),
        ("The whole model, with error feedback", "accumulator", "scope", DENSITIES),
        ("The whole model, without error feedback", "gradient", "scope", (0.01,)),
    ):
        rows = []
        for density in densities:
            given = layer(kind) if selection == "tensor" else vector(kind, density)
            d = given.size
            indices, values = select.topk(given.copy(), None, int(d * density))
            r = indices.size
            for family, name, codec in all_codecs():
                if kind == "accumulator" and isinstance(codec, ValueCodec):
                    codec = codec.under_feedback()
                tried = trial(codec, indices, values, d)
                calls = (tried.encode, tried.decode)
                seconds = [small_timed(call) for call in calls] if d < 10**6 else timed(*calls, runs=3)
                bits = 8 * tried.size / r
                if (kind, selection, density) == ("accumulator", "scope", 0.01):
                    points[family].append(Point(name, bits, sum(seconds) / r * 1e9, tried.error))
                rows.append(
                    [family, name, f"{density:.1%}", f"{bits:.2f}",
                     f"{entropy_bits(d, r) / r:.2f}" if family == "index" else "",
                     *(f"{s / r * 1e9:.1f}" for s in seconds), *(f"{4 * d / s / 1e9:.1f}" for s in seconds),
                     f"{tried.error:.2e}" if tried.error else "0"]
                )  # fmt: skip
        yield f"### {title}: {d:,} elements"
        each = "; the other densities are those of their own jobs" * (len(densities) > 1)
        yield f"Input: {described(kind, 0.01, selection)}{each}. Copying takes {1e3 * small_timed(given.copy):.3f} ms."
        yield table(
            ["", "codec", "density", "bits", "random subset", "encode ns", "decode ns", "encode GB/s", "decode GB/s",
             "relative L2 error"],
            rows,
        )  # fmt: skip
    title = "Accumulator of ResNet-50, 25.6 M elements, top 1%, one thread"
    panels = [Panel(f"{kind} codecs", "kept element", of) for kind, of in points.items()]
    draw(panels, title, DOC.parent / "figures" / "codecs.png")
    yield "![bits, time and error of every codec](figures/codecs.png)"


RIVALS: list[tuple[str, str, dict[str, Any], tuple[float, float], int]] = [
    ("Bloom P0, FPR 0.001", "index", {"name": "bloom", "policy": "p0", "fpr": 0.001}, (2.8, 2.1), 662),
    ("QSGD, sign and 7 bits, one l2 norm", "value", {"name": "qsgd", "bits": 8, "norm": "l2"}, (0.25, 0.10), 372),
]
"""Codecs of the papers' own code, on one core: 368 of 36,864 elements. The name, the settings of our codec that are the
same as its, milliseconds to encode and to decode, bytes. Its gradient is not known, so only codecs are here whose bytes
and work depend on the numbers of elements alone."""


def rivals_section() -> Iterator[str | None]:
    """Two of our codecs and the papers' own code, with the same settings."""
    gradient = layer("accumulator")
    indices, values = select.topk(gradient.copy(), None, 368)
    rows = []
    for name, kind, settings, theirs, size in RIVALS:
        tried = trial(getattr(Config.load(**{kind: settings}), kind), indices, values, SMALL)
        ours = [1000 * small_timed(call) for call in (tried.encode, tried.decode)]
        cells = (f"{mine:.3f}, {its} ({its / mine:.0f}x)" for mine, its in zip(ours, theirs, strict=True))
        rows.append([name, *cells, f"{tried.size}, {size}"])
    yield (
        f"Ours, theirs: 368 of {SMALL:,} elements, one core, the same settings. Ours: the first 3x3 convolution of "
        f"{described('accumulator', 0.01, 'tensor')}. Theirs: the reference code of DeepReduce, moved to the CPU, "
        "timed on another day and on a gradient that was not kept. So only codecs are compared whose bytes and work "
        "depend on the numbers of elements alone: run lengths, Huffman and Deflate have no row."
    )
    yield table(["codec", "encode ms", "decode ms", "bytes"], rows)


def overhead_section() -> Iterator[str | None]:
    """The overhead of a call: eight kept elements of 64."""
    gradient = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    indices, values = select.topk(gradient.copy(), None, 8)
    rows = []
    for kind, name, codec in all_codecs():
        tried = trial(codec, indices, values, 64)
        rows.append([kind, name, *(f"{1e6 * small_timed(call):.1f}" for call in (tried.encode, tried.decode))])
    yield table(["", "codec", "encode us", "decode us"], rows)


def bloom_section() -> Iterator[str | None]:
    """Bloom filters. Most of the time is the query for every index of the tensor."""
    gradient = vector("accumulator", 0.01)
    d = gradient.size
    indices, values = select.topk(gradient.copy(), None, d // 100)
    out = np.empty_like(gradient)
    rows = []
    for policy in ("p0", "p1", "p2", "leftmost", "middle", "rightmost"):
        index = Config.load(index={"name": "bloom", "policy": policy, "fpr": 0.001}).index
        tried = trial(index, indices, values, d)
        copy, encode, decode = timed(partial(np.copyto, out, gradient), tried.encode, tried.decode, runs=5)
        missed = np.setdiff1d(indices, tried.support).size
        rows.append(
            [policy, f"{8 * tried.size / indices.size:.2f}", f"{tried.support.size / indices.size:.4f}",
             f"{missed / indices.size:.2%}", f"{encode / copy:.2f}", f"{decode / copy:.2f}"]
        )  # fmt: skip
    yield (
        f"Input: rank 0 of {described('accumulator', 0.01)}. FPR 0.001, one thread. Baseline: a copy of the vector. "
        "Aim for p0: encoding and decoding each take at most 12 times as long. Bits and support hardly depend on the "
        "input."
    )
    yield table(
        ["policy", "bits / kept", "support / kept", "kept elements not sent", "encode / copy", "decode / copy"], rows
    )


def sparse_section() -> Iterator[str | None]:
    """An inherently sparse gradient: 60% of 31.8 M elements are nonzero. 7-bit QSGD."""
    d = 31_800_000
    generator = np.random.default_rng(1)
    gradient = generator.standard_normal(d, dtype=np.float32) * np.exp(generator.standard_normal(d, dtype=np.float32))
    gradient[generator.random(d, dtype=np.float32) >= 0.6] = 0
    rows = []
    for entropy in ("none", "huffman", "rans"):
        for norm in ("max", "l2"):
            value = {"name": "qsgd", "bits": 7, "norm": norm, "entropy": entropy}
            config = Config.load(sparsifier="nonzero", index="auto", value=value)
            pipeline = Pipeline(config, threads=1)
            packed = pipeline.encode(gradient, None, KEY)
            container = wire.unpack(packed)
            out = np.empty_like(gradient)
            pipeline.decode([container], out)
            error = float(np.linalg.norm(out - gradient) / np.linalg.norm(gradient))
            kept = container.count
            rows.append(
                [norm, entropy, f"{packed.nbytes / gradient.nbytes:.4f}", f"{8 * container.indices.size / d:.3f}",
                 f"{8 * container.values.size / kept:.3f}", f"{error:.3f}"]
            )  # fmt: skip
    yield table(
        ["norm", "entropy", "volume / dense", "index bits / element", "value bits / kept", "relative L2 error"], rows
    )


def training_section() -> Iterator[str | None]:
    """`make train` and `make train-tf` with three seeds."""
    out, rows, figures = ROOT / "runs" / "bench", [], DOC.parent / "figures"
    said = []
    for framework, name in (("tensorflow", "Keras"), ("torch", "PyTorch")):
        command = [sys.executable, str(ROOT / "scripts" / "train" / "compare.py"), "--framework", framework]
        if subprocess.run([*command, "--seeds", "3", "--runs", str(out)]).returncode:
            raise SystemExit("scripts/train/compare.py failed: its output above tells why")
        newest = max(out.iterdir(), key=lambda path: path.name)
        results = json.loads((newest / "results.json").read_text())
        said.insert(0, f"{name}: {Difference.of(results['steps']).sentences()}")
        for kind in ("dense", "compressed"):
            runs = results[kind]
            finals = [100 * run["epochs_done"][-1]["accuracy"] for run in runs]
            sent, dense = (sum(total(run["epochs_done"], key) for run in runs) for key in ("bytes_sent", "dense_bytes"))
            rows.insert(
                0,
                [name, kind, ", ".join(f"{a:.2f}" for a in finals), f"{np.mean(finals):.2f}", f"{sent / dense:.2%}",
                 f"{1e3 * float(np.median(results['steps'][kind])):.1f}"],
            )  # fmt: skip
    yield table(["", "job", "final accuracy, %", "mean", "bytes sent / dense", "step, ms"], rows)
    yield from said
    figures.mkdir(parents=True, exist_ok=True)
    (figures / "accuracy.png").write_bytes((newest / "accuracy.png").read_bytes())
    yield "![accuracy against bytes sent, PyTorch](figures/accuracy.png)"


def step_section() -> Iterator[str | None]:
    """Whole steps of every scope beside dense ones."""
    environment = {**os.environ, "HOROVOD_CACHE_CAPACITY": "8192"}  # the tensors of all jobs
    jobs = ["dense", "fp16", "default", "tensor", "model", "densestream", "auto"]
    for framework in ("torch", "tensorflow"):
        chosen = [job for job in jobs if framework == "torch" or job != "densestream"]
        command = ["mpirun", "-np", "2", sys.executable, str(ROOT / "scripts" / "bench" / "bench_step.py")]
        command += ["--framework", framework, *(f"--jobs={job}" for job in chosen)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT, env=environment)
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        rows = []
        for one in found:
            times = {job: middle for job, (_, middle, _) in one["ms"].items()}
            cells = [
                f"{time:.1f}" + (f" ({time / times['dense']:.2f}x)" if job not in ("local", "alone") else "")
                for job, time in times.items()
            ]
            added = [f"{(times[job] - times['local']) / times['alone']:.1f}" for job in ("default", "dense")]
            rows.append([f"{one['tensors']} tensors, {one['numel'] / 1e6:.3g} M", *cells, ", ".join(added)])
        yield table(["", *found[0]["ms"], "added: default, dense"], rows)


SECTIONS: dict[str, tuple[str, Callable[[], Iterator[str | None]]]] = {
    "pipeline": ("The recommended config, end to end", pipeline_section),
    "training": ("Training: accuracy against bytes", training_section),
    "indices": ("Lossless index codecs on random subsets of 25.6 M elements", indices_section),
    "inputs": ("Accumulators and raw gradients", inputs_section),
    "codecs": ("Every codec on captured vectors", codecs_section),
    "bloom": ("Bloom filters", bloom_section),
    "sparse": ("An inherently sparse gradient", sparse_section),
    "rivals": ("Beside the research code", rivals_section),
    "overhead": ("Overhead of a call", overhead_section),
    "step": ("A whole step", step_section),
}


def main(
    only: Annotated[list[str] | None, typer.Option(help="a section, or several: " + ", ".join(SECTIONS))] = None,
) -> None:
    """Runs the benchmarks, prints the tables and writes them to docs/results/benchmarks.md."""
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in only or SECTIONS:
        if name not in SECTIONS:
            raise typer.BadParameter(f"section {name!r} is unknown; choose from {', '.join(SECTIONS)}")
        title, function = SECTIONS[name]
        console.rule(title)
        load = os.getloadavg()[0]
        parts = list(function())
        level = ("portable", "AVX2", "AVX-512")[library.vector_level()]
        machine = f"{platform.machine()}, {os.cpu_count()} cores (load {load:.1f} before), {level} kernels"
        body = doc_sections.refreshed(DOC, name, parts, f"*{date.today()}, {machine}.*")
        print(body, flush=True)
        doc_sections.write(DOC, name, title, body)


if __name__ == "__main__":
    typer.run(main)
