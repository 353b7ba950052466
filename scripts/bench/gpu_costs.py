"""Counts what operations ask of a GPU, from the launch code itself: launches, waits, bytes in the GPU's memory.

    python scripts/bench/gpu_costs.py            # prints the table
    python scripts/bench/gpu_costs.py --launches # and each launch
    python scripts/bench/gpu_costs.py --write    # writes it to docs/architecture.md

The pipeline runs in the tests' emulator, and what it calls is counted; no GPU is needed. The times are estimates, from
the constants below. ``make bench-gpu`` measures the times on a GPU.
"""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from unittest import mock

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("dev", ".."))

import numpy as np
import typer
from doc_sections import ROOT, refreshed, write
from doc_sections import table as markdown

from hvd_deepreduce.codecs.interfaces import RngKey, joint_codecs
from hvd_deepreduce.codecs.joint.stream import Stream
from hvd_deepreduce.config import Config
from hvd_deepreduce.exchange.mpi.sum_buffer import SumBuffer
from hvd_deepreduce.ops import arrays, curve_fit, huffman, rans
from hvd_deepreduce.ops.device import clearing_at_once
from hvd_deepreduce.ops.program import Program
from hvd_deepreduce.pipeline import Pipeline, bundle
from hvd_deepreduce.pipeline.bundle import Slice
from tests import cuda_emulator
from tests.cuda_emulator import Traffic

KEY = RngKey(0, 0, 0)
SIZES = (100_000, 300_000)
"""Elements in the emulator, of which 1% are sent. The launches are the same for both."""
CODEC_SIZES = (96_000, 192_000)
"""Kept elements in the emulator, for single encoders."""
AT = 25_600_000
"""Elements for which the table is."""
HOST_US = {
    "launches": 16.0, "cleared": 7.0, "to the device": 13.0, "waits": 10.0, "allocations": 4.0, "views": 1.0,
    "native calls": 64.0, "launches of these": 4.2,
}  # fmt: skip
"""Microseconds of the host that are assumed for each, with the Python around it, as they fit what the host of an H200
took. A native call is a run of a program with all of its own (ops/program.py) but its launches."""
BANDWIDTH = 3.0e12
"""Bytes a second of an H100's memory, about."""
LAUNCH_US = 2.0
"""Microseconds from the end of a kernel to the first work of the next."""
STEP_US = 0.015
"""Microseconds of a load from shared memory or the first cache, or of a shuffle, whose result the next step needs."""
COPY_US = 8e6 * AT / BANDWIDTH
"""Microseconds of a device copy of float32: each element is read and written."""
PROCESSORS = 8 * 132
"""Blocks of a kernel that loops over its work, on an H100."""
CONFIGS: dict[str, dict[str, Any]] = {
    "top-k, rice_blocks, qsgd": {},
    "top-k, rice_blocks, signs of scaled momentum": {
        "memory": "scaled_momentum", "value": {"name": "sign", "magnitude": "one"},
    },
    "top-k, rANS, raw": {"index": "rans", "value": "raw"},
    "top-k, Bloom P0, raw": {"index": {"name": "bloom", "policy": "p0"}, "value": "raw"},
    "top-k, DenseStream": {"joint": "densestream", "index": None, "value": None},
}


AIMS = {"encode": 4.0, "decode and sum of 4 ranks": 3.0}
"""The most device copies that the recommended pipeline may take."""
BLOOM_AIM, HOST_AIM_US, RANS_AIM_US = 8.0, 150.0, 300.0
"""The most device copies of Bloom P0; the most time of the host; the most for ``INDICES`` indices in rANS."""
INDICES = AT // 100


class Found(NamedTuple):
    """What one call asked of the device."""

    counts: Counter[str]
    launches: list[Traffic]


class Estimate(NamedTuple):
    """A call at ``AT`` elements: bytes, and microseconds of the device. ``by_launch``: the latter of each launch."""

    read: float
    written: float
    by_launch: list[tuple[str, float]]

    @property
    def us(self) -> float:
        return sum(time for _, time in self.by_launch)


def counted(function: Callable[[], object]) -> Found:
    """What is asked of the emulated device by the call."""
    counts: Counter[str] = Counter()

    def counting(name: str, made: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **settings: Any) -> Any:
            counts[name] += 1
            result = made(*arguments, **settings)
            if name == "cleared":
                nbytes = (arguments[0] if result is None else result).nbytes  # fill returns nothing
                launches.append(Traffic("(clear)", 0, 0, nbytes, 0))
            return result

        return call

    array, run = cuda_emulator.EmulatedArray, Program.run

    def natively(program: Program, *arguments: Any, **settings: Any) -> Any:
        before, first = counts.copy(), len(launches)
        result = run(program, *arguments, **settings)
        counts.clear()
        counts.update(before)
        counts["native calls"] += 1
        counts["launches of these"] += sum(one.blocks > 0 for one in launches[first:])
        return result

    def allocated(size: int, dtype: Any) -> Any:
        counts["allocations"] += 1
        return empty(size, dtype)

    empty = cuda_emulator.empty
    with (
        cuda_emulator.counting() as launches,
        mock.patch.object(array, "fill", counting("cleared", array.fill)),
        mock.patch.object(cuda_emulator, "processors", PROCESSORS),
        mock.patch.object(array, "get", counting("waits", array.get)),
        mock.patch.object(cuda_emulator, "zeros", counting("cleared", cuda_emulator.zeros)),
        mock.patch.object(cuda_emulator, "asarray", counting("to the device", cuda_emulator.asarray)),
        mock.patch.object(cuda_emulator, "empty", allocated),
        mock.patch.object(array, "view", counting("views", array.view)),
        mock.patch.object(array, "__getitem__", counting("views", array.__getitem__)),
        mock.patch.object(Program, "run", natively),
    ):
        function()
    counts["launches"] = sum(one.blocks > 0 for one in launches) - counts["launches of these"]
    return Found(counts, launches)


def extrapolated(
    small: Found, large: Found, at_full: dict[str, int], sizes: tuple[int, int] = SIZES, at: int = AT
) -> Estimate:
    """The call at so many elements.

    Args:
        small, large: the call at the two sizes.
        at_full: steps of kernels, by name, that do not grow evenly.
        sizes, at: elements.
    """
    if [one.kernel for one in small.launches] != [one.kernel for one in large.launches]:
        raise RuntimeError("the launches depend on the size, so they cannot be extrapolated")

    def grown(first: int, second: int) -> float:
        return first + (second - first) * (at - sizes[0]) / (sizes[1] - sizes[0])

    read = written = 0.0
    times = []
    for one, other in zip(small.launches, large.launches, strict=True):
        of_read, of_written = grown(one.read, other.read), grown(one.written, other.written)
        steps = grown(one.steps, other.steps) if one.blocks == other.blocks else 0.0
        steps = at_full.get(one.kernel, steps)
        read, written = read + of_read, written + of_written
        busy = max((of_read + of_written) / BANDWIDTH * 1e6, steps * STEP_US)
        times.append((one.kernel, LAUNCH_US + busy))
    return Estimate(read, written, times)


def of_rans() -> tuple[dict[str, int], list[tuple[str, float]]]:
    """The steps of rANS's kernels for ``INDICES`` indices, and the device's microseconds to encode and to decode."""
    chosen = np.sort(np.random.default_rng(0).choice(AT, INDICES, replace=False)).astype(np.uint32)
    indices = cuda_emulator.asarray(chosen)
    sections: list[Any] = []
    encoding = counted(lambda: sections.append(rans.encode_indices(indices))).launches
    decoding = counted(lambda: rans.decode_indices(sections[0], AT, INDICES)).launches
    # In the emulator one block encodes all parts, one after the other; on a GPU each is encoded by its own.
    part = indices[: INDICES // next(one.blocks for one in encoding if one.kernel == "rans_encode")]
    of_part = counted(lambda: rans.encode_indices(part)).launches
    steps = {
        name: next(one.steps for one in launches if one.kernel == name)
        for name, launches in (("rans_encode", of_part), ("rans_decode", decoding))
    }

    def us(launches: list[Traffic]) -> float:
        busy = [max((one.read + one.written) / BANDWIDTH * 1e6, steps.get(one.kernel, 0) * STEP_US) for one in launches]
        return sum(busy) + LAUNCH_US * len(launches)

    return steps, [("encode", us(encoding)), ("decode", us(decoding))]


def written(out: Any) -> Callable[[], object]:
    """Writes the sum of an exchange to a GPU. Of its elements, 8% are not zero, as of 8 ranks that send others each."""
    kept = np.sort(np.random.default_rng(8).choice(out.size, out.size // 100 * 8, replace=False)).astype(np.uint32)
    stream = Stream.from_indices(out.size, kept, np.ones(kept.size, np.float32), 0)

    def write() -> object:
        total = SumBuffer(out.size, out.dtype, True, out)
        total.write_region([stream], 0, out.size)
        return total.result()

    return write


def host_us(counts: Counter[str]) -> float:
    """Microseconds of the host for what was counted."""
    return sum(counts[what] * each_us for what, each_us in HOST_US.items())


def numbers(counts: Counter[str]) -> list[str]:
    """The cells of a table for what was counted, and the host's time for it."""
    return [*(str(counts[what]) for what in HOST_US), f"{host_us(counts):.0f} us"]


def of_codecs(each: Callable[[str, Estimate], None]) -> str:
    """A table of single encoders, for ``INDICES`` kept elements."""
    rng, lines = np.random.default_rng(0), []

    def sketches(name: str, count: int) -> Callable[[], object]:
        indices = cuda_emulator.asarray(np.sort(rng.choice(100 * count, count, replace=False)).astype(np.uint32))
        values = cuda_emulator.asarray(rng.standard_normal(count, np.float32))
        codec = joint_codecs.by_name[name]()
        return lambda: codec.encode(indices, values, 100 * count, KEY)

    def fitted(count: int) -> Callable[[], object]:
        ordered = cuda_emulator.asarray(np.sort(rng.standard_normal(count, np.float32))[::-1].copy())
        return lambda: curve_fit.fit_poly_encode(ordered, 5, 4)

    def symbols(count: int) -> Callable[[], object]:
        numbers = cuda_emulator.asarray(np.minimum(rng.geometric(0.05, count), 255).astype(np.uint8))
        return lambda: huffman.encode(numbers)

    for name, make in {
        "encode: SketchML": lambda count: sketches("sketchml", count),
        "encode: SKCompress": lambda count: sketches("skcompress", count),
        "encode sorted values: fit_poly": fitted,
        "encode symbols: Huffman": symbols,
    }.items():
        found = []
        for count in CODEC_SIZES:
            with clearing_at_once():
                found.append(counted(make(count)))
        estimate = extrapolated(found[0], found[1], {}, CODEC_SIZES, INDICES)
        each(name, estimate)
        lines.append([name, *numbers(found[0].counts), f"{estimate.us:.0f} us"])
    return markdown([f"{INDICES:,} kept elements", *HOST_US, "host", "device"], lines, right=True)


def table(each: Callable[[str, Estimate], None] = lambda name, estimate: None) -> str:
    """The table, in Markdown, and below it what misses its aim. ``each`` is called with each operation."""
    lines: list[list[str]] = []
    at_full, rans_us = of_rans()
    gradients = [np.random.default_rng(0).standard_normal(numel, np.float32) for numel in SIZES]
    missed: list[str] = []
    slow: list[str] = []

    def row(operation: str, config: str, functions: Sequence[Callable[[], object]], aim: float | None) -> None:
        found = [counted(function) for function in functions]
        counts, estimate = found[0].counts, extrapolated(found[0], found[1], at_full)
        host = host_us(counts)
        name, copies = f"{operation}: {config}", estimate.us / COPY_US
        lines.append([
            name, *numbers(counts), f"{estimate.read / 1e6:.0f} MB", f"{estimate.written / 1e6:.0f} MB",
            f"{estimate.us:.0f} us", f"{copies:.1f}",
        ])  # fmt: skip
        each(name, estimate)
        if host > HOST_AIM_US and operation != "decode and sum of 4 ranks":
            slow.append(f"{name} {host:.0f} us")
        if aim is not None and copies > aim:
            missed.append(f"{name}: {copies:.1f} copies, and the aim is {aim:g}")

    for name, settings in CONFIGS.items():
        pipeline = Pipeline(Config.load("recommended", **settings))
        slices = [[Slice(pipeline, (0, numel), KEY)] for numel in SIZES]
        there = [cuda_emulator.asarray(gradient) for gradient in gradients]
        outs = [cuda_emulator.zeros(numel, np.float32) for numel in SIZES]
        residuals = [cuda_emulator.zeros(numel, np.float32) for numel in SIZES]
        velocities = [cuda_emulator.zeros(numel, np.float32) if settings.get("memory") else None for numel in SIZES]
        aims: dict[str, float] = AIMS if not settings else {}
        if "Bloom" in name:
            aims = {"encode": BLOOM_AIM, "decode and sum of 4 ranks": BLOOM_AIM}
        encodes = [
            partial(bundle.encode, gradient, residual, velocity, own, 2, False)
            for gradient, residual, velocity, own in zip(there, residuals, velocities, slices, strict=True)
        ]
        row("encode", name, encodes, aims.get("encode"))
        for ranks in (4, 8):
            zeros = [np.zeros(numel, np.float32) if settings.get("memory") else None for numel in SIZES]
            sent = [
                pipeline.encode(gradient, None if zero is None else zero.copy(), KEY, 2, velocity=zero)
                for gradient, zero in zip(gradients, zeros, strict=True)
            ]
            data = [cuda_emulator.asarray(np.concatenate([one] * ranks)) for one in sent]
            decodes = [
                partial(bundle.sum_into, out, given, ranks, own, 1.0)
                for out, given, own in zip(outs, data, slices, strict=True)
            ]
            operation = f"decode and sum of {ranks} ranks"
            row(operation, name, decodes, aims.get(operation))
    selecting = Pipeline(Config.load("recommended"))

    def selected(gradient: Any, residual: Any) -> Callable[[], object]:
        return lambda: [arrays.to_host(part) for part in selecting.select(gradient, residual, KEY) or ()]

    selections = [selected(*both) for both in zip(there, residuals, strict=True)]
    row("select and copy to the host, for an exchange over MPI", "top-k", selections, None)
    row("write the sum of 8 ranks, of an exchange over MPI", "DenseStream", [written(out) for out in outs], None)
    for name, us in rans_us:
        if us > RANS_AIM_US:
            missed.append(f"{name} of {INDICES:,} indices in rANS: {us:.0f} us, and the aim is {RANS_AIM_US:.0f} us")
    of_rans_said = f"{INDICES:,} indices in rANS: " + ", ".join(f"{name} {us:.0f} us" for name, us in rans_us) + "."
    aims_said = (
        f"The aims are {AIMS['encode']:g} copies for an encode and {AIMS['decode and sum of 4 ranks']:g} for a decode "
        f"and sum of 4 ranks, of the recommended pipeline; {BLOOM_AIM:g} for Bloom P0; {RANS_AIM_US:.0f} us for "
        f"{INDICES:,} symbols in rANS; and {HOST_AIM_US:.0f} us of the host for an encode, or for a decode of 8 ranks."
        + (f" Missed: {'; '.join(missed)}." if missed else "")
        + (f" The host takes longer, as estimated, for: {'; '.join(slow)}." if slow else "")
    )
    head = ["operation", *HOST_US, "host", "read", "written", "device", "copies"]
    parts = [markdown(head, lines, right=True), of_rans_said, of_codecs(each), aims_said]
    return "\n\n".join(parts)


def main(
    writes: Annotated[bool, typer.Option("--write", help="write the table to docs/architecture.md")] = False,
    launches: Annotated[bool, typer.Option(help="print the device's time of each launch, too")] = False,
) -> None:
    """Prints or writes the table."""
    reason = cuda_emulator.available()
    if reason:
        sys.exit(f"gpu_costs: {reason}")

    def each(name: str, estimate: Estimate) -> None:
        if launches:
            print(name, *(f"    {kernel} {time:.1f} us" for kernel, time in estimate.by_launch), sep="\n")

    text = table(each)
    if writes:
        page, name = ROOT / "docs" / "architecture.md", "gpu costs"
        write(page, name, "What operations ask of a GPU", refreshed(page, name, text.split("\n\n")))
    print(text)


if __name__ == "__main__":
    typer.run(main)
