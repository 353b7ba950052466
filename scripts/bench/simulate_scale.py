#!/usr/bin/env python3
"""Counts the messages and bytes of every allreduce on hundreds of ranks, by simulating the ranks in one process.

    scripts/bench/simulate_scale.py --write                                       # as in docs/densestream.md
    scripts/bench/simulate_scale.py --input uniform --ranks 4,64 --density 0.1

Each rank has an input of its own: ``uniform`` and ``skewed`` ones are random; ``captured`` are the accumulators of
--file (scripts/bench/capture_gradients.py), up to as many ranks as the file has, all elements. Counted are the messages
of the programs with their headers, for every slice, and the small collectives of a call (``exchange.costs``). The dense
ring and the allgather of containers are computed. The time is that of the latency-bandwidth model, alpha x messages +
bytes / rate, for the busiest rank. Its messages follow each other; that slices overlap, and the time to select, pack
and merge, are left out.

Writes OUTPUT.json and OUTPUT.png. Needs no MPI. 1,024 ranks with a million elements need 16 GB.
"""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("dev", "papers", ".."))

import captured
import doc_sections
import numpy as np
import typer

from hvd_deepreduce import Config
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.joint.densestream import DenseStream
from hvd_deepreduce.codecs.sparse_tensor import SparseTensor
from hvd_deepreduce.exchange import costs
from hvd_deepreduce.exchange.mpi import densestream, sparcml, topk_allgather
from hvd_deepreduce.exchange.mpi.transport import Program
from hvd_deepreduce.ops import select
from hvd_deepreduce.pipeline import Pipeline
from tests.support.simulated_mpi import Network, SimulatedTransport

DOC = doc_sections.ROOT / "docs" / "densestream.md"
STYLES = {
    "dense": "k--", "allgather": "x-", "TopkA": "s-", "TopkDA split": "^-", "TopkDA doubling": "v-", "DSA": "o-",
    "DSA coded": "D-",
}  # fmt: skip
CODECS = {"index": "rice", "value": {"name": "qsgd", "bits": 7, "bucket_size": 512}}
"""The containers of the allgather: the codecs of the preset fast."""
NETWORKS = (("1 Gbit/s, alpha 50 us", 1e9, 50e-6), ("25 Gbit/s, alpha 10 us", 25e9, 10e-6))
Rows = dict[str, list[dict[str, Any]]]
"""Of each input, what was counted."""


class Uniform:
    """Random supports, and normal values."""

    title = "uniform: every rank keeps a random subset of its own"
    most_ranks, seed = 1 << 20, 1

    def __init__(self, numel: int) -> None:
        self.numel = numel

    def keys(self, rng: np.random.Generator) -> np.ndarray:
        """The elements with the largest keys are kept, float32 ``[numel]``."""
        return rng.random(self.numel, np.float32)

    def chosen(self, rng: np.random.Generator, rank: int, count: int) -> np.ndarray:
        """The elements that a rank keeps, in any order."""
        return np.argpartition(self.keys(rng), self.numel - count)[self.numel - count :]

    def kept(self, rank: int, density: float) -> SparseTensor:
        """What a rank keeps, the same at every call."""
        rng = np.random.default_rng((self.seed, rank))
        indices = np.sort(self.chosen(rng, rank, max(1, int(density * self.numel)))).astype(np.uint32)
        return SparseTensor(self.numel, indices, rng.standard_normal(indices.size, np.float32))


class Skewed(Uniform):
    """Random supports in which element i has the weight 1 / (i + 1)."""

    title = "skewed: every rank keeps a random subset of its own, element i with weight 1 / (i + 1)"

    def keys(self, rng: np.random.Generator) -> np.ndarray:
        # Gumbel noise on the logarithms of the weights: a sample without replacement with these weights.
        return rng.gumbel(size=self.numel) - np.log(np.arange(1, self.numel + 1))


class Captured:
    """The accumulators of a file."""

    def __init__(self, file: Path) -> None:
        self.file, self.title = file, f"captured: {captured.describe(file, 'accumulator')}"
        self.most_ranks, self.numel = captured.rank_count(file), captured.about(file)["numel"]

    def kept(self, rank: int, density: float) -> SparseTensor:
        """The top-k elements of the rank's accumulator."""
        row = captured.read(self.file, "accumulator", rank)
        return SparseTensor(self.numel, *select.topk(row, None, max(1, int(density * self.numel))))


def programs_of(name: str, tensors: list[SparseTensor], slices: int):
    """The function that returns a rank's programs, for ``Network.run``."""
    numel, dtype, size = tensors[0].numel, tensors[0].values.dtype, len(tensors)

    def ignore(rank: int, section: np.ndarray) -> None:
        pass

    if name == "TopkA":
        return lambda transport: [topk_allgather.program(transport, tensors[transport.rank], ignore)]
    if name == "TopkDA split":
        return lambda transport: sparcml.split_allgather(transport, tensors[transport.rank], slices, None)
    if name == "TopkDA doubling":
        return lambda transport: [sparcml.recursive_doubling(transport, tensors[transport.rank], None)]
    codec = DenseStream(coded=name == "DSA coded")
    if size <= densestream.DIRECT_RANKS:
        bounds, programs = [numel * part // slices for part in range(slices + 1)], densestream.direct_programs
    else:
        bounds, programs = densestream.balanced_split(tensors, size * slices)[0], densestream.programs

    def make(transport: SimulatedTransport) -> list[Program]:
        plan = densestream.Plan(codec, numel, dtype, bounds, slices, RngKey(0, 0, 0), None)
        return programs(transport, tensors[transport.rank], plan, None)

    return make


def simulate(name: str, tensors: list[SparseTensor]) -> dict[str, float]:
    """The messages (of which ``small`` are in the small collectives) and bytes of the busiest rank, in one call."""
    size, numel = len(tensors), tensors[0].numel
    if name == "dense":
        cost = costs.dense(size, numel)
        return {"messages": cost.messages, "small": 0, "received": 4 * cost.words}
    if name == "allgather":
        container = Pipeline(Config.load(sparsifier="nonzero", error_feedback=False, **CODECS)).encode(
            tensors[0].dense(), None, RngKey(0, 0, 0)
        )
        return {"messages": size - 1, "small": 0, "received": (size - 1) * container.size}
    slices = densestream.slice_count(max(tensor.indices.size for tensor in tensors), size)
    cells: list[int] = []
    if name.startswith("DSA") and size > densestream.DIRECT_RANKS:
        _, cells = densestream.balanced_split(tensors, size * slices)
    return counted(size, programs_of(name, tensors, slices), cells)


def counted(size: int, programs: Any, cells: list[int]) -> dict[str, float]:
    """What the busiest rank of some programs sends or waits for, with the small collectives of the call."""
    network, small = Network(size), costs.small_collectives(size, *cells)
    network.run(programs)
    return {
        "messages": int(network.messages.max()) + small.messages, "small": small.messages,
        "received": int(network.received.max()) + small.beside,
    }  # fmt: skip


def shown(number: float) -> str:
    """Three digits."""
    return f"{number:.3g}" if number < 1000 else f"{number:,.0f}"


def milliseconds(row: dict[str, Any], rate: float, alpha: float) -> float:
    """The time of the latency-bandwidth model."""
    return 1e3 * (alpha * row["messages"] + 8 * row["received"] / rate)


def draw(results: Rows, path: Path) -> None:
    """Plots bytes per rank against ranks, both axes logarithmic, one panel for each input."""
    import figure_kit

    figure, panels = figure_kit.plain(len(results), figsize=(5 * len(results), 4.2), sharey=True, squeeze=False)
    for (title, found), axes in zip(results.items(), panels[0], strict=True):
        for name, style in STYLES.items():
            rows = [row for row in found if row["name"] == name]
            ranks, received = [row["ranks"] for row in rows], [row["received"] / row["numel"] for row in rows]
            axes.plot(ranks, received, style, markersize=4, label=name)
        axes.set_xscale("log", base=2)
        axes.set(yscale="log", xlabel="ranks", title=title)
        axes.grid(True, which="major", alpha=0.3)
    panels[0][0].set_ylabel("bytes received by the busiest rank,\nper element of the vector")
    panels[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure_kit.save(figure, path, dpi=110)


def tables(title: str, found: list[dict[str, Any]]) -> str:
    """Two tables of one input: MB and messages; the model's milliseconds."""
    cell = {(row["ranks"], row["name"]): row for row in found}

    def table(shows: Any) -> str:
        ranks = sorted({row["ranks"] for row in found})
        return doc_sections.table(["ranks", *STYLES], ([n, *(shows(cell[n, name]) for name in STYLES)] for n in ranks))

    def bytes_and_messages(row: dict[str, Any]) -> str:
        return f"{shown(row['received'] / 1e6)} ({row['messages']:.0f})"

    return (
        f"**{title[0].upper()}{title[1:]}.** {found[0]['numel']:,} float32 elements, of which a rank keeps "
        f"{found[0]['kept']:,}. MB that the busiest rank receives, and in parentheses the messages that it sends or "
        f"waits for:\n\n{table(bytes_and_messages)}\n\n"
        f"Milliseconds of the model, at {' and '.join(label for label, _, _ in NETWORKS)}:\n\n{table(modelled)}"
    )


def modelled(row: dict[str, Any]) -> str:
    """Milliseconds of each network."""
    return ", ".join(shown(milliseconds(row, *net[1:])) for net in NETWORKS)


def text(results: Rows, titles: dict[str, str]) -> str:
    """The section of docs/densestream.md, whose first paragraphs are there."""
    each = (part for name, found in results.items() for part in tables(titles[name], found).split("\n\n"))
    picture = "![bytes per rank against ranks](results/figures/densestream_scale.png)"
    return doc_sections.refreshed(DOC, "scale", [None, None, *each, picture])


def main(
    inputs: Annotated[str, typer.Option("--input", help="comma-separated inputs")] = "uniform,skewed,captured",
    file: Annotated[Path | None, typer.Option(help="of captured accumulators; default: ResNet-50's")] = None,
    numel: Annotated[int, typer.Option(help="elements of uniform and skewed vectors")] = 1_000_000,
    density: Annotated[float, typer.Option(help="density of top-k, in (0, 1]")] = 0.01,
    ranks: Annotated[str, typer.Option(help="comma-separated numbers of ranks")] = "2,4,16,64,256",
    output: Annotated[Path, typer.Option(help="the results without .json and .png")] = Path("runs/scale"),
    write: Annotated[bool, typer.Option("--write", help="write tables and figure to docs/densestream.md")] = False,
) -> None:
    """Counts messages and bytes of every exchange."""
    makers: dict[str, Any] = {
        "uniform": lambda: Uniform(numel), "skewed": lambda: Skewed(numel),
        "captured": lambda: Captured(file or captured.path("resnet50", density)),
    }  # fmt: skip
    if write and density != 0.01:
        raise typer.BadParameter(f"--write is for a density of 0.01, of which {DOC.name} tells")
    if unknown := set(inputs.split(",")) - set(makers):
        raise typer.BadParameter(f"--input has {', '.join(sorted(unknown))}; allowed are {', '.join(makers)}")
    results: Rows = {}
    titles = {}
    for name in inputs.split(","):
        given, results[name] = makers[name](), []
        titles[name] = given.title
        counts = [int(count) for count in ranks.split(",") if int(count) <= given.most_ranks]
        kept = [given.kept(rank, density) for rank in range(max(counts))]
        for count in counts:
            for algorithm in STYLES:
                row = {"ranks": count, "name": algorithm, "numel": given.numel, "kept": int(kept[0].indices.size)}
                row |= simulate(algorithm, kept[:count])
                results[name].append(row)
                print(f"{name} {count:5d} ranks  {algorithm:16s} {row['messages']:7.0f} messages  "
                      f"{row['received'] / 1e6:9.2f} MB in  {modelled(row)} ms", flush=True)  # fmt: skip
    output.parent.mkdir(parents=True, exist_ok=True)
    about = {"density": density, "inputs": titles, "networks": NETWORKS}
    output.with_suffix(".json").write_text(json.dumps({**about, "results": results}, indent=1))
    draw(results, output.with_suffix(".png"))
    if write:
        draw(results, doc_sections.RESULTS / "figures" / "densestream_scale.png")
        doc_sections.write(DOC, "scale", "How the exchanges scale", text(results, titles))


if __name__ == "__main__":
    typer.run(main)
