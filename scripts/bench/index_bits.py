"""Bits per index of the index codecs on accumulators of compressed training, beside the entropy of a static model.

    python scripts/bench/index_bits.py --write

The inputs are the accumulators of ResNet-50, which scripts/bench/capture_gradients.py has captured, and of the GPT of
scripts/train/gpt_job.py, which is trained here for some steps at each density. Writes a section of
docs/results/benchmarks.md, and one of docs/results/presets.md with the bits of whole containers.

The static model gives each element the probability t * (row's share) * (column's share) * elements, with the numbers of
kept elements that the tensor, the row and the column really have. These numbers are not paid for, so the model knows
more than any code can.
"""

import math
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Annotated, Any

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("dev", "train"))

import captured
import doc_sections
import gpt_job
import numpy as np
import torch
import typer
from gpt_job import SMALL
from networks import NETWORKS
from simulated_ranks import SimulatedRanks

from hvd_deepreduce import Config
from hvd_deepreduce.codecs.index.context import Context
from hvd_deepreduce.codecs.index.rans import Rans
from hvd_deepreduce.codecs.index.rice import Rice
from hvd_deepreduce.codecs.index.rice_blocks import RiceBlocks
from hvd_deepreduce.codecs.interfaces import IndexCodec, RngKey
from hvd_deepreduce.codecs.sparsify.topk import kept_of
from hvd_deepreduce.pipeline import Pipeline

CODECS: tuple[IndexCodec, ...] = (Rice(), RiceBlocks(), Rans(), Context())
KEY = RngKey(0, 0, 0)
Shapes = Sequence[tuple[int, ...]]
BITS = (3, 4, 7)
CONTAINERS: dict[str, dict[str, Any]] = {
    "`rice`, `qsgd`": {"index": "rice", "value": "qsgd"},
    "`rice_blocks`, `qsgd` with rANS": {"index": "rice_blocks", "value": {"name": "qsgd", "entropy": "rans"}},
    "`context`, `qsgd` with rANS": {"index": "context", "value": {"name": "qsgd", "entropy": "rans"}},
    "`context_qsgd`": {"joint": "context_qsgd"},
}
"""Settings of whole containers, without the bits of a value."""
TEXT = """\
Bits per index of the top {densities} of the accumulators of one rank, selected from the whole model as one vector.

{table}

The static models know, and do not pay for, how many elements of each tensor, and of each row and column (the first two
dimensions), are kept. Of the kept elements drawn anew at random within each tensor, the model of rows and columns still
takes fewer bits than the model of tensors, since it follows chance; *corrected* adds this difference, and is what rows
and columns are really worth. Rice, one b a tensor, is without the headers of the tensors' containers.

Nanoseconds of CPU time per index, encode / decode, of one thread (the best of {repeats}; other work ran on
the machine):

{times}

ResNet-50: {resnet}.

GPT: that of scripts/train/gpt_job.py, {numel:,} elements, {steps} steps of AdamW on 2 ranks, from
gradients at the same density, with error feedback.

*{today}, scripts/bench/index_bits.py.*"""


CONTAINERS_TEXT = """\
Whole containers, in bits per kept element, of the accumulators of [benchmarks.md](benchmarks.md#bits-per-index), with
{bits} bits for a value:

{table}

*{today}, scripts/bench/index_bits.py.*"""


def top(vector: np.ndarray, density: float) -> np.ndarray:
    """The indices of the elements of largest magnitude."""
    kept = kept_of(density, vector.size)
    return np.sort(np.argpartition(-np.abs(vector), kept)[:kept]).astype(np.uint32)


def of_tensors(indices: np.ndarray, shapes: Shapes) -> Iterator[tuple[tuple[int, ...], int, np.ndarray]]:
    """Each tensor's shape, its number of elements and its kept elements."""
    begin = 0
    for shape in shapes:
        numel = math.prod(shape)
        low, high = np.searchsorted(indices, [begin, begin + numel])
        yield shape, numel, indices[low:high].astype(np.int64) - begin
        begin += numel


def static_bits(indices: np.ndarray, shapes: Shapes, rows_and_columns: bool) -> float:
    """Bits per index of the static model."""
    bits = 0.0
    for shape, numel, kept in of_tensors(indices, shapes):
        if not kept.size:
            continue
        rows, columns = (shape[0], shape[1]) if rows_and_columns and len(shape) > 1 else (1, 1)
        each = numel // (rows * columns)
        row, column = kept // (numel // rows), kept // each % columns
        of_rows, of_columns = np.bincount(row, minlength=rows), np.bincount(column, minlength=columns)
        p = np.minimum(np.outer(of_rows, of_columns) / kept.size / each, 1 - 1e-9)
        zeros = np.log2(1 - p)
        bits -= np.log2(p[row, column]).sum() + each * zeros.sum() - zeros[row, column].sum()
    return bits / indices.size


def drawn_anew(indices: np.ndarray, shapes: Shapes) -> np.ndarray:
    """As many kept elements of each tensor, at random."""
    rng, begin, drawn = np.random.default_rng(0), 0, []
    for _, numel, kept in of_tensors(indices, shapes):
        drawn.append(begin + np.sort(rng.choice(numel, kept.size, replace=False)))
        begin += numel
    return np.concatenate(drawn).astype(np.uint32)


def bits_of(codec: IndexCodec, indices: np.ndarray, numel: int) -> float:
    return 8 * codec.encode(indices, numel, KEY)[0].size / indices.size


def container_bits(settings: dict[str, Any], bits: int, accumulator: np.ndarray, density: float) -> float:
    """Bits of a container for each element that it keeps, with so many bits for a value."""
    given = {"sparsifier": {"name": "topk", "density": density}, **settings}
    config = Config.load(given, **{"joint" if "joint" in settings else "value": {"bits": bits}})
    container = Pipeline(config, 1).encode(accumulator, None, KEY)
    return 8 * container.size / kept_of(density, accumulator.size)


def seconds(codec: IndexCodec, indices: np.ndarray, numel: int, repeats: int) -> tuple[float, float]:
    """CPU time of an encode and of a decode, the best of several."""
    best = [math.inf, math.inf]
    for _ in range(repeats):
        begin = time.thread_time()
        section, _ = codec.encode(indices, numel, KEY)
        middle = time.thread_time()
        codec.decode(section, numel, indices.size, KEY)
        best = [min(best[0], middle - begin), min(best[1], time.thread_time() - middle)]
    return best[0], best[1]


def row(indices: np.ndarray, shapes: Shapes) -> dict[str, float]:
    """The figures of one input, by the name of the column."""
    numel = sum(map(math.prod, shapes))
    tensor, whole = (static_bits(indices, shapes, deep) for deep in (False, True))
    anew = drawn_anew(indices, shapes)
    gained = static_bits(anew, shapes, False) - static_bits(anew, shapes, True)
    by_tensor = sum(
        8 * Rice().encode(kept.astype(np.uint32), size, KEY)[0].size for _, size, kept in of_tensors(indices, shapes)
    )
    return {
        "static, tensors": tensor,
        "static, rows and columns": whole,
        "corrected": whole + gained,
        "rice, one b a tensor": by_tensor / indices.size,
    } | {codec.name: bits_of(codec, indices, numel) for codec in CODECS}


def gpt_accumulator(density: float, steps: int) -> np.ndarray:
    """Residual and gradient of a rank of the GPT's training."""
    job, flat = gpt_job.Job(), SMALL.initial(0)
    parameter = torch.nn.Parameter(flat)
    optimizer = torch.optim.AdamW([parameter], 2.5e-3, betas=(0.9, 0.99), weight_decay=0.1)
    ranks = SimulatedRanks(Config.load("fast", density=density), 2, SMALL.SIZES)
    generators = [torch.Generator().manual_seed(17 + rank) for rank in range(2)]

    def gradients() -> list[np.ndarray]:
        found = [torch.empty(SMALL.NUMEL) for _ in generators]
        for generator, out in zip(generators, found, strict=True):
            job.gradient(parameter.data, [generator], out)
        return [one.numpy() for one in found]

    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 2.5e-3 * gpt_job.rate(step, 2 * steps)
        parameter.grad = torch.from_numpy(ranks.mean(gradients()))
        torch.nn.utils.clip_grad_norm_([parameter], 1.0)
        optimizer.step()
    return ranks.residuals[0] + gradients()[0]


def main(
    density: Annotated[list[float] | None, typer.Option(help="can be repeated; default: 0.01 and 0.001")] = None,
    folder: Annotated[Path, typer.Option(help="folder of the captured gradients")] = captured.FOLDER,
    steps: Annotated[int, typer.Option(min=1, help="steps of the GPT's training")] = 400,
    repeats: Annotated[int, typer.Option(min=1, help="timed runs, of which the best counts")] = 15,
    write: Annotated[bool, typer.Option("--write", help="write benchmarks.md and presets.md in docs/results/")] = False,
) -> None:
    """Prints the tables, and writes them with --write."""
    torch.set_num_threads(1)
    densities = density or [0.01, 0.001]
    resnet: Shapes = [tuple(one.shape) for one in NETWORKS["resnet50"](1000).parameters()]
    inputs: list[tuple[str, np.ndarray, Shapes]] = []
    containers = [[kind] for kind in CONTAINERS]

    def add(name: str, one: float, accumulator: np.ndarray, shapes: Shapes) -> None:
        inputs.append((f"{name}, {one:.1%}", top(accumulator, one), shapes))
        for line, made in zip(containers, CONTAINERS.values(), strict=True):
            line.append(" / ".join(f"{container_bits(made, bits, accumulator, one):.1f}" for bits in BITS))

    for one in densities:
        add("ResNet-50", one, captured.read(captured.path("resnet50", one, folder=folder), "accumulator", 0), resnet)
    for one in densities:
        add("GPT", one, gpt_accumulator(one, steps), SMALL.SHAPES)
    figures = {name: row(indices, shapes) for name, indices, shapes in inputs}
    kinds = list(next(iter(figures.values())))
    table = partial(doc_sections.table, right=True)
    bits = table(["", *figures], ([kind, *(f"{one[kind]:.2f}" for one in figures.values())] for kind in kinds))
    lines: list[list[Any]] = [[codec.name] for codec in CODECS]
    for _, indices, shapes in inputs:
        for line, codec in zip(lines, CODECS, strict=True):
            taken = seconds(codec, indices, sum(map(math.prod, shapes)), repeats)
            line.append(" / ".join(f"{1e9 * one / indices.size:.1f}" for one in taken))
    body = TEXT.format(
        densities=" and ".join(f"{one:.1%}" for one in densities), table=bits, times=table(["", *figures], lines),
        resnet=captured.describe(captured.path("resnet50", densities[0], folder=folder), "accumulator"),
        numel=SMALL.NUMEL, steps=steps, repeats=repeats, today=date.today(),
    )  # fmt: skip
    whole = CONTAINERS_TEXT.format(
        bits=" / ".join(map(str, BITS)), table=table(["index, value", *figures], containers), today=date.today()
    )
    print(f"{body}\n\n{whole}")
    if write:
        doc_sections.write(doc_sections.RESULTS / "benchmarks.md", "index bits", "Bits per index", body)
        doc_sections.write(doc_sections.RESULTS / "presets.md", "container bits", "Bits per kept element", whole)


if __name__ == "__main__":
    typer.run(main)
