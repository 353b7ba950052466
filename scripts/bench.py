"""`make bench`: measures the time and the size of every codec on one thread, and writes docs/benchmarks.md.

Every time is the median of several runs; a first run is not counted. Where a table has ratios to a copy, the copy of
the dense vector with NumPy is timed in turn with the function, so that the ratio does not depend on the speed of the
machine. Each section can be run alone:

    python scripts/bench.py --only pipeline --only indices
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import doc_sections
import matplotlib
import numpy as np
import typer
from capture_gradients import capture
from rich.console import Console
from scipy.special import gammaln

from hvd_deepreduce import Config
from hvd_deepreduce import container as wire
from hvd_deepreduce.codec import U32, Floats, IndexCodec, RngKey, ValueCodec, index_codecs, joint_codecs, value_codecs
from hvd_deepreduce.ops import library, select
from hvd_deepreduce.pipeline import Pipeline, unordered

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

ROOT = Path(__file__).parent.parent
DOC = ROOT / "docs" / "benchmarks.md"
KEY = RngKey(0, 0, 0)
LARGE, SMALL = 25_600_000, 36_864
DENSITIES = (0.001, 0.01, 0.1)
console = Console(width=140)


def timed(*functions: Callable[[], Any], runs: int = 9) -> list[float]:
    """The median seconds of each function. The functions run in turn."""
    for function in functions:
        function()
    seconds: list[list[float]] = [[] for _ in functions]
    for _ in range(runs):
        for number, function in enumerate(functions):
            begin = time.perf_counter()
            function()
            seconds[number].append(time.perf_counter() - begin)
    return [median(one) for one in seconds]


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


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def entropy_bits(d: int, r: int) -> float:
    """log2 C(d, r)."""
    return float((gammaln(d + 1) - gammaln(r + 1) - gammaln(d - r + 1)) / math.log(2)) if r else 0.0


def captured() -> np.ndarray[Any, np.dtype[np.float32]]:
    """Four gradients of ResNet-50, ``[4, numel]``. A short training captures them if the file does not exist."""
    path = ROOT / "data" / "captured" / "resnet50.npz"
    if not path.exists():
        capture("resnet50", path, steps=20, ranks=4, batch_size=16, classes=1000, seed=0)
    with np.load(path) as file:
        return np.stack([file[f"gradient_{rank}"] for rank in range(4)])


def layer(gradient: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The first 3x3 convolution of ResNet-50's first stage: 64 x 64 x 3 x 3 = 36,864 elements."""
    path = ROOT / "data" / "captured" / "resnet50.npz"
    with np.load(path) as file:
        names, ends = list(file["names"]), np.cumsum(file["sizes"])
    at = names.index("4.body.3.weight")
    return gradient[ends[at] - SMALL : ends[at]].copy()


@dataclass
class Trial:
    """One codec applied to one selection.

    Attributes:
        encode, decode: the calls to time.
        size: bytes of the section, and of the order if there is one.
        support: the indices that a receiver decodes.
        error: L2 norm of the lost part, relative to the values.
    """

    encode: Callable[[], Any]
    decode: Callable[[], Any]
    size: int
    support: U32
    error: float


def trial(codec: Any, indices: U32, values: Floats, d: int) -> Trial:
    """Encodes with an index, value or joint codec, and returns both calls, ready to be timed."""
    r, norm = indices.size, float(np.linalg.norm(values))
    if isinstance(codec, IndexCodec):
        section, support = codec.encode(indices, d, KEY)
        count = support.size
        return Trial(
            lambda: codec.encode(indices, d, KEY),
            lambda: codec.decode(section, d, count, KEY),
            section.size,
            support,
            0.0,
        )
    if isinstance(codec, ValueCodec):
        section, order = codec.encode(values, indices, KEY)
        decoded = unordered(codec.decode(section, r, indices, values.dtype, KEY), order)
        return Trial(
            lambda: codec.encode(values, indices, KEY),
            lambda: codec.decode(section, r, indices, values.dtype, KEY),
            section.size + (0 if order is None else (r * (r - 1).bit_length() + 7) // 8),
            indices,
            float(np.linalg.norm(decoded - values)) / norm,
        )
    section, support = codec.encode(indices, values, d, KEY)
    count = support.size
    got, decoded = codec.decode(section, d, count, False, values.dtype, KEY)
    error = np.zeros(d, values.dtype)
    error[indices] = values
    error[got] -= decoded
    return Trial(
        lambda: codec.encode(indices, values, d, KEY),
        lambda: codec.decode(section, d, count, False, values.dtype, KEY),
        section.size,
        support,
        float(np.linalg.norm(error)) / norm,
    )


def all_codecs() -> Iterator[tuple[str, str, Any]]:
    """(kind, name, codec with default settings) of every codec that a container can name."""
    for kind, registry in (("index", index_codecs), ("value", value_codecs), ("joint", joint_codecs)):
        for name, codec in sorted(registry.by_name.items()):
            if name != "auto":
                yield kind, name, codec()


def pipeline_section() -> Iterator[str]:
    """The recommended config on 25.6 M elements, compared with a copy and with torch.topk."""
    import torch

    torch.set_num_threads(1)
    generator = np.random.default_rng(0)
    gradient = generator.standard_normal(LARGE, dtype=np.float32)
    gradient *= np.exp(generator.standard_normal(LARGE, dtype=np.float32))
    residual, out = np.zeros_like(gradient), np.zeros_like(gradient)
    pipeline = Pipeline(Config.load("topk_rice_qsgd"), threads=1)
    containers = [pipeline.encode(gradient, residual, RngKey(0, 0, step)) for step in range(4)]

    def decode() -> None:
        pipeline.decode([wire.unpack(one) for one in containers], out, 0.25)

    copy, encode, decoded = timed(
        lambda: np.copyto(out, gradient), lambda: pipeline.encode(gradient, residual, KEY), decode
    )
    tensor = torch.from_numpy(gradient)
    copy2, topk = timed(lambda: np.copyto(out, gradient), lambda: tensor.abs().topk(LARGE // 100), runs=3)
    yield (
        f"25.6 M float32 (normal x lognormal), top 1%, rice, 7-bit QSGD. A container has {containers[0].nbytes:,} "
        f"bytes, {containers[0].nbytes / gradient.nbytes:.2%} of dense. Copying the vector took {1000 * copy:.1f} ms."
    )
    yield table(
        ["one thread", "ms", "time / copy", "aim", "least traffic / copy"],
        [
            ["encode: accumulate, exact top-k, rice, QSGD, subtract what is sent", f"{1000 * encode:.1f}",
             f"{encode / copy:.2f}", "5", "2.0"],
            ["decode and sum 4 containers", f"{1000 * decoded:.1f}", f"{decoded / copy:.2f}", "3", "0.5"],
            ["torch.topk of the magnitudes alone", f"{1000 * topk:.0f}", f"{topk / copy2:.1f}", "", ""],
        ],
    )  # fmt: skip
    yield (
        "The least traffic is counted in 4-byte words per element. The copy has 2: one read and one written. Encoding "
        "has 4: it reads the gradient twice (first to check that it is finite, before anything is changed), and reads "
        "and writes the residual. Decoding has 1: it writes the output once."
    )


def random_subset(d: int, r: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.sort(np.random.default_rng(r).choice(d, r, replace=False).astype(np.uint32))


def indices_section() -> Iterator[str]:
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


def codecs_section() -> Iterator[str]:
    """Every codec on captured gradients: bits, time and error, as a table and as a figure."""
    whole = captured()[0]
    yield (
        f"Gradients of ResNet-50 during training (scripts/capture_gradients.py): all {whole.size:,} elements, and the "
        f"{SMALL:,} elements of its first 3x3 convolution. Index codecs encode the indices of the exact top-k, value "
        "codecs its values, joint codecs both. All codecs have their default settings. Bits and nanoseconds are per "
        "kept element; GB/s refer to the dense gradient."
    )
    points = []
    for gradient in (layer(whole), whole):
        d = gradient.size
        rows = []
        for density in DENSITIES:
            indices, values = select.topk(gradient.copy(), None, int(d * density))
            r = indices.size
            for kind, name, codec in all_codecs():
                tried = trial(codec, indices, values, d)
                calls = (tried.encode, tried.decode)
                seconds = [small_timed(call) for call in calls] if d < 10**6 else timed(*calls, runs=3)
                bits = 8 * tried.size / r
                points.append(Point(kind, name, d, density, bits, sum(seconds) / r * 1e9, tried.error))
                rows.append(
                    [kind, name, f"{density:.1%}", f"{bits:.2f}",
                     f"{entropy_bits(d, r) / r:.2f}" if kind == "index" else "",
                     *(f"{s / r * 1e9:.1f}" for s in seconds), *(f"{4 * d / s / 1e9:.1f}" for s in seconds),
                     f"{tried.error:.2e}" if tried.error else "0"]
                )  # fmt: skip
        yield f"### {d:,} elements (copying takes {1000 * small_timed(gradient.copy):.3f} ms)"
        yield table(
            ["", "codec", "density", "bits", "entropy", "encode ns", "decode ns", "encode GB/s", "decode GB/s",
             "relative L2 error"],
            rows,
        )  # fmt: skip
    draw([p for p in points if p.numel > 10**6 and p.density == 0.01])
    yield "![bits, time and error of every codec](figures/codecs.png)"


class Point(NamedTuple):
    kind: str
    name: str
    numel: int
    density: float
    bits: float
    nanoseconds: float
    error: float


def draw(points: list[Point]) -> None:
    """Plots bits against time; the colour is the error."""
    figure, panels = pyplot.subplots(1, 3, figsize=(14, 4.8), layout="constrained")
    for kind, axes in zip(("index", "value", "joint"), panels, strict=True):
        mine = [p for p in points if p.kind == kind]
        shown = axes.scatter(
            [p.nanoseconds for p in mine], [p.bits for p in mine], c=[math.log10(max(p.error, 1e-4)) for p in mine],
            cmap="viridis_r", vmin=-4, vmax=0, s=60, edgecolors="black", linewidths=0.5,
        )  # fmt: skip
        for number, p in enumerate(sorted(mine, key=lambda p: p.bits)):
            # Alternate the labels above and below the points, so that those of neighbouring points do not overlap.
            place = (5, 5 if number % 2 else -11)
            axes.annotate(p.name, (p.nanoseconds, p.bits), fontsize=8, xytext=place, textcoords="offset points")
        axes.set_xscale("log")
        axes.set_yscale("log", base=2)
        axes.set_xlabel("encode + decode, ns per kept element")
        axes.set_ylabel("bits per kept element")
        axes.set_title(f"{kind} codecs")
        axes.grid(alpha=0.3)
    figure.colorbar(shown, ax=panels, label="log10 of the relative L2 error (index codecs: none)")
    figure.suptitle("ResNet-50's gradient, 25.6 M elements, top 1%, one thread")
    (DOC.parent / "figures").mkdir(parents=True, exist_ok=True)
    figure.savefig(DOC.parent / "figures" / "codecs.png", dpi=110)
    pyplot.close(figure)


class Rival(NamedTuple):
    """The research code on 36,864 elements, 368 of them kept, on one core.

    Attributes:
        timed: ``"index"`` or ``"value"``: the codec to which the times refer.
    """

    name: str
    index: Any
    value: Any
    timed: str
    encode_ms: float | None
    decode_ms: float | None
    index_bytes: int
    value_bytes: int


RIVALS = [
    Rival("key-value, raw", "raw", "raw", "index", None, None, 1472, 1472),
    Rival("Bloom P0, FPR 0.001", {"name": "bloom", "policy": "p0", "fpr": 0.001}, "raw", "index", 2.8, 2.1, 662, 1592),
    Rival("RLE", "rle", "raw", "index", 136, 5.9, 924, 1472),
    Rival("Huffman", "huffman", "raw", "index", 31, 34, 906, 1472),
    Rival("QSGD, 7 bits", "raw", {"name": "qsgd", "bits": 7}, "value", 0.25, 0.10, 1472, 372),
    Rival("Deflate", "raw", "deflate", "value", 0.40, 0.90, 1472, 1358),
]


def rivals_section() -> Iterator[str]:
    """Our figures and those of the research code, on one core and for input of the same shape."""
    gradient = layer(captured()[0])
    indices, values = select.topk(gradient.copy(), None, 368)
    rows = []
    for rival in RIVALS:
        config = Config.load(index=rival.index, value=rival.value)
        index = trial(config.index, indices, values, SMALL)
        value = trial(config.value, index.support, gradient[index.support], SMALL)
        timed_one = index if rival.timed == "index" else value
        ours = [1000 * small_timed(call) for call in (timed_one.encode, timed_one.decode)]
        rows.append(
            [rival.name,
             *(f"{our:.3f}" if their is None else f"{our:.3f} ({their}: {their / our:.0f}x)"
               for our, their in zip(ours, (rival.encode_ms, rival.decode_ms), strict=True)),
             f"{index.size} ({rival.index_bytes})", f"{value.size} ({rival.value_bytes})"]
        )  # fmt: skip
    yield (
        "36,864 elements of a real gradient, of which 368 are kept. The figures in brackets are those of the research "
        "code on its own gradient, and how many times faster ours is. The entropy of the indices is "
        f"{entropy_bits(SMALL, 368) / 8:.0f} bytes."
    )
    yield table(["codec", "encode ms", "decode ms", "index bytes", "value bytes"], rows)


def overhead_section() -> Iterator[str]:
    """The overhead of a call: eight kept elements of 64."""
    gradient = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    indices, values = select.topk(gradient.copy(), None, 8)
    rows = []
    for kind, name, codec in all_codecs():
        tried = trial(codec, indices, values, 64)
        rows.append([kind, name, *(f"{1e6 * small_timed(call):.1f}" for call in (tried.encode, tried.decode))])
    yield "Microseconds per call for eight values. Nearly all of it is the overhead of the call itself. Aim: 60."
    yield table(["", "codec", "encode us", "decode us"], rows)


def bloom_section() -> Iterator[str]:
    """Bloom filters. Most of the time is the query for every index of the tensor."""
    gradient = captured()[0]
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
        f"{d:,} elements, density 1%, FPR 0.001, one thread. Aim for p0: encoding and decoding each take at most 12 "
        "times as long as the copy."
    )
    yield table(
        ["policy", "bits / kept", "support / kept", "kept elements not sent", "encode / copy", "decode / copy"], rows
    )


def sparse_section() -> Iterator[str]:
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
    yield (
        "60% of 31.8 M elements are nonzero, at random positions. 7-bit QSGD with buckets of 512. The best volume in "
        "the papers is 0.2063. Aim: 0.15."
    )
    yield table(
        ["norm", "entropy", "volume / dense", "index bits / element", "value bits / kept", "relative L2 error"], rows
    )


def training_section() -> Iterator[str]:
    """`make train` and `make train-tf` with three seeds."""
    out, rows, figures = ROOT / "runs" / "bench", [], DOC.parent / "figures"
    for framework, name in (("tensorflow", "Keras"), ("torch", "PyTorch")):
        command = [sys.executable, str(ROOT / "scripts" / "compare.py"), "--framework", framework]
        if subprocess.run([*command, "--seeds", "3", "--runs", str(out)]).returncode:
            raise SystemExit("scripts/compare.py failed: its output above tells why")
        newest = max(out.iterdir(), key=lambda path: path.name)
        results = json.loads((newest / "results.json").read_text())
        for kind in ("dense", "compressed"):
            runs = results[kind]
            finals = [100 * run["epochs_done"][-1]["accuracy"] for run in runs]
            sent, dense = (
                sum(row[key] for run in runs for row in run["epochs_done"]) for key in ("bytes_sent", "dense_bytes")
            )
            rows.insert(
                0,
                [name, kind, ", ".join(f"{a:.2f}" for a in finals), f"{np.mean(finals):.2f}", f"{sent / dense:.2%}",
                 f"{np.mean([sum(row['seconds'] for row in run['epochs_done']) for run in runs]):.0f}"],
            )  # fmt: skip
    yield (
        "The digits job of `make train` and `make train-tf` (a ResNet of 0.7 M parameters, two ranks, 20 epochs) with "
        "three seeds. Aim: an accuracy within 1 point of the dense one, with at most 1.5% of the dense bytes."
    )
    yield table(["", "job", "final accuracy, %", "mean", "bytes sent / dense", "seconds"], rows)
    figures.mkdir(parents=True, exist_ok=True)
    (figures / "accuracy.png").write_bytes((newest / "accuracy.png").read_bytes())
    yield "![accuracy against bytes sent, PyTorch](figures/accuracy.png)"


def adapter_section() -> Iterator[str]:
    """The time of a step that is not encoding, waiting or decoding."""
    rows = []
    for framework, name in (("torch", "PyTorch"), ("tensorflow", "TensorFlow")):
        command = ["mpirun", "-np", "2", sys.executable, str(ROOT / "scripts" / "bench_adapter.py"), framework]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
        found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
        rest = found["step"] - found["encode"] - found["wait"] - found["decode"]
        rows.append(
            [name, *(f"{found[key]:.1f}" for key in ("dense", "step", "encode", "wait", "decode")),
             f"{1e3 * rest / found['tensors']:.0f}", f"{1e3 * (rest - found['dense']) / found['tensors']:.0f}"]
        )  # fmt: skip
    yield (
        f"A step with {found['tensors']} tensors of {found['numel']:,} elements on two ranks, in milliseconds. The "
        "last two columns are in microseconds per tensor: the rest of the step (all but encoding, waiting and "
        "decoding; it includes Horovod's own work), and this rest less the dense step. Aim: 300."
    )
    yield table(
        ["", "dense", "compressed", "encode", "wait", "decode", "rest, us / tensor", "rest - dense, us / tensor"], rows
    )


SECTIONS: dict[str, tuple[str, Callable[[], Iterator[str]]]] = {
    "pipeline": ("The recommended config, end to end", pipeline_section),
    "training": ("Training: accuracy against bytes", training_section),
    "indices": ("Lossless index codecs on random subsets of 25.6 M elements", indices_section),
    "codecs": ("Every codec on real gradients", codecs_section),
    "bloom": ("Bloom filters", bloom_section),
    "sparse": ("An inherently sparse gradient", sparse_section),
    "rivals": ("Comparison with the research code", rivals_section),
    "overhead": ("Overhead of a call", overhead_section),
    "adapter": ("Overhead of the adapters", adapter_section),
}


HEAD = """# Benchmarks

`make bench` (scripts/bench.py) writes this page; run it to see the figures of your machine. Times are medians on one
thread. Compare them only as ratios within a table, because they were measured on shared and noisy machines.
"""


def main(
    only: Annotated[
        list[str] | None, typer.Option(help="a section to run; can be repeated: " + ", ".join(SECTIONS))
    ] = None,
) -> None:
    """Runs the benchmarks, prints the tables and writes them to docs/benchmarks.md."""
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in only or SECTIONS:
        if name not in SECTIONS:
            raise typer.BadParameter(f"section {name!r} is unknown; choose from {', '.join(SECTIONS)}")
        title, function = SECTIONS[name]
        console.rule(title)
        parts = list(function())
        level = ("portable", "AVX2", "AVX-512")[library.vector_level()]
        parts.append(f"*{date.today()}, {platform.machine()}, {os.cpu_count()} cores, {level} kernels.*")
        body = "\n\n".join(parts)
        print(body, flush=True)
        doc_sections.write(DOC, name, title, body, HEAD)


if __name__ == "__main__":
    typer.run(main)
