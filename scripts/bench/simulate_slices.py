#!/usr/bin/env python3
"""Counts the bytes of allgather and reduce_scatter on up to 1,024 ranks, by running the real programs in one process.

    scripts/bench/simulate_slices.py --write                                 # as in docs/exchanges.md
    scripts/bench/simulate_slices.py --inputs hot --ranks 4,64 --numel 100000

Inputs are those of simulate_scale.py, ``large`` (uniform, with 16 times as many elements), and those below, which load
ranks unequally. The selection is given; everything else of the exchange runs, encoding and decoding of all containers
included, but that only one rank decodes the result, whose bytes are the same for all. The allgather's containers are
encoded, and their bytes added up.

An element's worth of bytes is the mean over the ranks of the bytes of a rank's own container, divided by its elements.
The time is that of the latency-bandwidth model for the busiest rank. A collective has P - 1 messages.
"""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("dev", ".."))

import captured
import doc_sections
import numpy as np
import typer
from simulate_scale import Captured, Rows, Skewed, Uniform, counted, modelled, shown

from hvd_deepreduce import Config
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.joint.densestream import DenseStream
from hvd_deepreduce.codecs.joint.stream import Stream
from hvd_deepreduce.codecs.joint.stream_format import pack, value_codec
from hvd_deepreduce.codecs.sparse_tensor import SparseTensor
from hvd_deepreduce.codecs.sparsify.topk import kept_of
from hvd_deepreduce.exchange.mpi import densestream
from hvd_deepreduce.exchange.reduce_scatter import DecodedSum, SlicedSum
from hvd_deepreduce.pipeline import Pipeline
from tests.support.simulated_collectives import CollectiveNetwork

DOC = doc_sections.ROOT / "docs" / "exchanges.md"
CODECS = {
    "coded": {"index": "rice", "value": {"name": "qsgd", "bits": 7, "bucket_size": 512}},
    "raw": {"index": "raw", "value": "raw"},
}
"""Those of the preset fast, and indices and values of 4 bytes each."""
WAYS = ("allgather", "reduce_scatter", "with density", "densestream")
STREAMS = {"coded": DenseStream(value="qsgd", bits=7), "raw": DenseStream()}
"""The codecs of densestream, whose sum has the density too."""


class Hot(Uniform):
    """Supports in the first P-th of the vector, which is one rank's slice: with equal slices it receives everything."""

    title, seed = "hot: all ranks keep elements of the first P-th of the vector", 2

    def __init__(self, numel: int, ranks: int) -> None:
        super().__init__(numel)
        self.ranks = ranks

    def place(self, rank: int, kept: int) -> tuple[int, int]:
        """Where the rank's elements are: begin and width."""
        return 0, max(kept, self.numel // self.ranks)

    def chosen(self, rng: np.random.Generator, rank: int, count: int) -> np.ndarray:
        begin, width = self.place(rank, count)
        return begin + rng.permutation(width)[:count]


class Ends(Hot):
    """Supports at the front and at the back."""

    title = "ends: half of the ranks keep elements of the first hundredth of the vector, and half of the last"

    def place(self, rank: int, kept: int) -> tuple[int, int]:
        width = max(kept, self.numel // 100)
        return rank % 2 * (self.numel - width), width


class Alike(Uniform):
    """Equal supports."""

    title = "alike: all ranks keep the same random elements"

    def kept(self, rank: int, density: float) -> SparseTensor:
        indices = super().kept(0, density).indices
        return SparseTensor(self.numel, indices, super().kept(rank, density).values)


class Given(SlicedSum):
    """A rank's part in a sum, of which the selection is given."""

    tensor: SparseTensor
    reads: bool = True

    def _select(self) -> Any:
        return None, (self.tensor.indices, self.tensor.values)

    def _decoded(self, gathered: Any, keys: Any) -> DecodedSum:
        return super()._decoded(gathered, keys) if self.reads else DecodedSum([], 1)


def simulate_stream(tensors: list[SparseTensor], codec: DenseStream, density: float) -> dict[str, float]:
    """``simulate`` of densestream, with its small collectives."""
    size, numel, dtype = len(tensors), tensors[0].numel, tensors[0].values.dtype
    own = [pack(Stream.from_sparse(one, codec.gap(numel, dtype)), codec.form, value_codec(codec.value, codec.bits))
           for one in tensors]  # fmt: skip
    slices = densestream.slice_count(max(one.indices.size for one in tensors), size)
    bounds, cells = densestream.balanced_split(tensors, size * slices, cuts=True)
    most = kept_of(density, numel)

    def programs(transport: Any) -> Any:
        plan = densestream.Plan(codec, numel, dtype, bounds, slices, RngKey(0, 0, 0), None, most)
        return densestream.programs(transport, tensors[transport.rank], plan, None)

    found = counted(size, programs, cells)
    return {**found, "container": float(np.mean([one.size for one in own]))}


def simulate(tensors: list[SparseTensor], label: str, density: float | None, way: str) -> dict[str, float]:
    """Messages and bytes of the busiest rank, and the bytes of a container."""
    size, numel = len(tensors), tensors[0].numel
    if way == "densestream":
        return simulate_stream(tensors, STREAMS[label], density)
    nothing = np.zeros(numel, np.float32)
    pipeline = Pipeline(Config.load(CODECS[label], sparsifier="nonzero", error_feedback=False, scope="model"))
    own = [
        pipeline.encode_selected(nothing, None, one.indices, one.values, RngKey(0, 0, 0, rank))[0].size
        for rank, one in enumerate(tensors)
    ]
    mean = float(np.mean(own))
    if way == "allgather":
        return {"messages": size - 1, "received": sum(own) - min(own), "container": mean}
    top = density if way == "with density" else None
    settings = {"exchange": {"name": "reduce_scatter", "density": top}, "error_feedback": False}
    pipeline = Pipeline(Config.load(CODECS[label], sparsifier="nonzero", scope="model", **settings))
    network, programs = CollectiveNetwork(size), []
    for rank, tensor in enumerate(tensors):
        work = Given(pipeline, size, RngKey(0, 0, 0, rank), nothing)
        work.tensor, work.reads = tensor, rank == 0
        programs.append(work.steps())
    network.run(programs)
    collectives = network.alltoalls + network.allgathers
    assert collectives >= (4 if top else 2)
    return {"messages": collectives * (size - 1), "received": int(network.received.max()), "container": mean}


def worth(row: dict[str, Any]) -> float:
    """Received bytes in units of what a rank keeps: of k elements' worth of bytes."""
    return float(row["received"] / row["container"])


def table(title: str, found: list[dict[str, Any]]) -> str:
    """One input: how many times k elements' worth of bytes the busiest rank receives, and the model's milliseconds."""
    cell = {(row["ranks"], row["codecs"], row["way"]): row for row in found}
    head = ["ranks", *(f"{codecs}: {way}" for codecs in CODECS for way in WAYS)]
    head += [f"ms, coded: {WAYS[0]}", *WAYS[1:]]
    lines = []
    for ranks in sorted({row["ranks"] for row in found}):
        rows = [cell.get((ranks, codecs, way)) for codecs in CODECS for way in WAYS]
        sizes = ["" if row is None else shown(worth(row)) for row in rows]
        lines.append([ranks, *sizes, *("" if row is None else modelled(row) for row in rows[: len(WAYS)])])
    title = f"**{title[0].upper()}{title[1:]}.** {found[0]['numel']:,} elements, k = {found[0]['kept']:,}:"
    return f"{title}\n\n{doc_sections.table(head, lines)}"


def text(results: Rows, titles: dict[str, str], density: float) -> str:
    """The section of docs/exchanges.md."""
    first = next(iter(results.values()))
    found = {codecs: [row["container"] / row["kept"] for row in first if row["codecs"] == codecs] for codecs in CODECS}
    bytes_of = ", ".join(f"{codecs} {shown(float(np.mean(sizes)))}" for codecs, sizes in found.items())
    about = f"""\
`scripts/bench/simulate_slices.py --write` runs the exchange's real programs for all ranks in one process, with real
containers, and counts every byte of the busiest rank: containers with their headers, and the histogram. The selection
is given, at a density of {density:.0%}; `with density` sends a sum of {density:.0%} again. `coded` has the codecs of
`fast` (Rice, 7-bit QSGD), `raw` has 4 bytes for an index and 4 for a value. Figures are bytes in units of a
rank's own container, that is, of k elements' worth of bytes ({bytes_of} bytes an element in the first table)."""
    each = (part for name, found in results.items() for part in table(titles[name], found).split("\n\n"))
    return doc_sections.refreshed(DOC, "slices", [about, None, None, *each]) + "\n"


def main(
    inputs: Annotated[str, typer.Option(help="comma-separated: uniform, large, skewed, hot, ends, alike, captured")] = (
        "uniform,skewed,hot,ends,alike,captured"
    ),
    ranks: Annotated[str, typer.Option(help="comma-separated numbers of ranks")] = "2,4,16,64,256,1024",
    numel: Annotated[int, typer.Option(help="elements of the vectors that are not captured")] = 1_000_000,
    codecs: Annotated[str, typer.Option(help=f"comma-separated: {', '.join(CODECS)}")] = ",".join(CODECS),
    ways: Annotated[str, typer.Option(help=f"comma-separated: {', '.join(WAYS)}")] = ",".join(WAYS),
    density: Annotated[float, typer.Option(help="of top-k, and of the sum, in (0, 1]")] = 0.01,
    file: Annotated[Path | None, typer.Option(help="of captured accumulators; default: ResNet-50's")] = None,
    output: Annotated[Path, typer.Option(help="the results")] = Path("runs/slices.json"),
    keep: Annotated[bool, typer.Option(help="add to the results that are in the file")] = False,
    write: Annotated[bool, typer.Option(help="write the section of docs/exchanges.md from the results")] = False,
) -> None:
    """Runs the simulations."""
    makers = {
        "uniform": lambda count: Uniform(numel),
        "large": lambda count: Uniform(16 * numel),
        "skewed": lambda count: Skewed(numel),
        "hot": lambda count: Hot(numel, count),
        "ends": lambda count: Ends(numel, count),
        "alike": lambda count: Alike(numel),
        "captured": lambda count: Captured(file or captured.path("resnet50", density)),
    }
    stored = json.loads(output.read_text()) if keep and output.exists() else {"results": {}, "inputs": {}}
    results, titles = stored["results"], stored["inputs"]
    for name in filter(None, inputs.split(",")):
        for count in map(int, ranks.split(",")):
            given = makers[name](count)
            if count > given.most_ranks:
                continue
            titles[name] = given.title
            tensors = [given.kept(rank, density) for rank in range(count)]
            for label in codecs.split(","):
                for way in ways.split(","):
                    row = {"ranks": count, "codecs": label, "way": way, "numel": given.numel}
                    row |= {"kept": int(tensors[0].indices.size), **simulate(tensors, label, density, way)}
                    place = {key: row[key] for key in ("ranks", "codecs", "way")}
                    before = [one for one in results.get(name, []) if any(one[key] != place[key] for key in place)]
                    results[name] = [*before, row]
                    print(f"{name} {count:5d} ranks  {label:6s} {way:15s} {row['messages']:7.0f} messages  "
                          f"{worth(row):8.2f} k", flush=True)  # fmt: skip
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps({"density": density, "inputs": titles, "results": results}, indent=1))
    if write:
        doc_sections.write(DOC, "slices", "How allgather and reduce_scatter scale", text(results, titles, density))


if __name__ == "__main__":
    typer.run(main)
