#!/usr/bin/env python3
"""Counts the messages and bytes of every allreduce on hundreds of ranks, by simulating the ranks in one process.

    scripts/bench/simulate_scale.py --write                                       # as in docs/densestream.md
    scripts/bench/simulate_scale.py --input uniform --ranks 4,64 --density 0.1

Inputs, of which each rank has its own; no rank's elements are copied or shuffled from another's:

uniform
    A rank keeps a uniformly random subset. Supports overlap as little as those of independent ranks can.
skewed
    A rank keeps a random subset in which element i has a weight of 1 / (i + 1), as in an embedding whose rows are
    sorted by frequency: nearly all ranks keep the first elements, and regions of equal length are loaded unequally.
captured
    The accumulators of --file (scripts/bench/capture_gradients.py), up to as many ranks as the file has, all elements.

Counted are the messages of the programs with their headers (``exchange.simulation``), for every slice, and the small
collectives of a call: the ranks' cards, the sums of the histogram (DSA on more than two ranks), the agreement
(``exchange.costs``). The dense ring
and the allgather of containers are computed: 2 (P - 1) / P N words in 2 (P - 1) messages, and P - 1 containers in P - 1
messages. What Horovod's coordinator sends is not counted, for none of them.

The time is that of the latency-bandwidth model, alpha x messages + bytes / rate, for the busiest rank. Its messages
follow each other; that slices overlap, and the time to select, pack and merge, are left out.

Writes OUTPUT.json and OUTPUT.png, the bytes that the busiest rank receives against the number of ranks. With --write,
the figure and the tables go to docs/densestream.md. Needs no MPI. 1,024 ranks with a million elements need 16 GB.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("dev",))

import captured
import doc_sections
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from hvd_deepreduce import Config  # noqa: E402
from hvd_deepreduce.codecs.interfaces import RngKey  # noqa: E402
from hvd_deepreduce.codecs.joint.densestream import DenseStream  # noqa: E402
from hvd_deepreduce.codecs.sparse_tensor import SparseTensor  # noqa: E402
from hvd_deepreduce.exchange import costs  # noqa: E402
from hvd_deepreduce.exchange.mpi import densestream, sparcml, topk_allgather  # noqa: E402
from hvd_deepreduce.exchange.mpi.transport import Program  # noqa: E402
from hvd_deepreduce.ops import select  # noqa: E402
from hvd_deepreduce.pipeline import Pipeline  # noqa: E402
from tests.support.simulated_mpi import Network, SimulatedTransport  # noqa: E402

DOC = ROOT / "docs" / "densestream.md"
STYLES = {
    "dense": "k--", "allgather": "x-", "TopkA": "s-", "TopkDA split": "^-", "TopkDA doubling": "v-", "DSA": "o-",
    "DSA coded": "D-",
}  # fmt: skip
CODECS = {"index": "rice", "value": {"name": "qsgd", "bits": 7, "bucket_size": 512}}
"""The containers of the allgather: the codecs of the preset topk_model."""
NETWORKS = (("1 Gbit/s, alpha 50 us", 1e9, 50e-6), ("25 Gbit/s, alpha 10 us", 25e9, 10e-6))


class Uniform:
    """Random supports, and normal values."""

    most_ranks = 1 << 20

    def __init__(self, numel: int) -> None:
        self.numel = numel

    def keys(self, rng: np.random.Generator) -> np.ndarray:
        """The elements with the largest keys are kept, float32 ``[numel]``."""
        return rng.random(self.numel, np.float32)

    def kept(self, rank: int, density: float) -> SparseTensor:
        """What a rank keeps, the same at every call."""
        rng = np.random.default_rng((1, rank))
        count = max(1, int(density * self.numel))
        chosen = np.argpartition(self.keys(rng), self.numel - count)[self.numel - count :]
        return SparseTensor(self.numel, np.sort(chosen).astype(np.uint32), rng.standard_normal(count, np.float32))

    def __str__(self) -> str:
        return "uniform: every rank keeps a random subset of its own"


class Skewed(Uniform):
    """Random supports in which element i has the weight 1 / (i + 1)."""

    def keys(self, rng: np.random.Generator) -> np.ndarray:
        # Gumbel noise on the logarithms of the weights: a sample without replacement with these weights.
        return rng.gumbel(size=self.numel) - np.log(np.arange(1, self.numel + 1))

    def __str__(self) -> str:
        return "skewed: every rank keeps a random subset of its own, element i with weight 1 / (i + 1)"


class Captured:
    """The accumulators of a file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.most_ranks, self.numel = captured.rank_count(file), captured.about(file)["numel"]

    def kept(self, rank: int, density: float) -> SparseTensor:
        """The top-k elements of the rank's accumulator."""
        row = captured.read(self.file, "accumulator", rank)
        return SparseTensor(self.numel, *select.topk(row, None, max(1, int(density * self.numel))))

    def __str__(self) -> str:
        return f"captured: {captured.describe(self.file, 'accumulator')}"


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
    network = Network(size)
    network.run(programs_of(name, tensors, slices))
    cells: list[int] = []
    if name.startswith("DSA") and size > densestream.DIRECT_RANKS:
        _, cells = densestream.balanced_split(tensors, size * slices)
    small = costs.small_collectives(size, *cells)
    return {
        "messages": int(network.messages.max()) + small.messages,
        "small": small.messages,
        "received": int(network.received.max()) + small.beside,
    }


def shown(number: float) -> str:
    """Three digits."""
    return f"{number:.3g}" if number < 1000 else f"{number:,.0f}"


def milliseconds(row: dict, rate: float, alpha: float) -> float:
    """The time of the latency-bandwidth model."""
    return 1e3 * (alpha * row["messages"] + 8 * row["received"] / rate)


def draw(results: dict[str, list[dict]], path: Path) -> None:
    """Plots bytes per rank against ranks, both axes logarithmic, one panel for each input."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(results), figsize=(5 * len(results), 4.2), sharey=True, squeeze=False)
    for (title, found), axes in zip(results.items(), panels[0], strict=True):
        for name, style in STYLES.items():
            rows = [row for row in found if row["name"] == name]
            ranks, received = [row["ranks"] for row in rows], [row["received"] / row["numel"] for row in rows]
            axes.plot(ranks, received, style, markersize=4, label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("ranks")
        axes.set_title(title)
        axes.grid(True, which="major", alpha=0.3)
    panels[0][0].set_ylabel("bytes received by the busiest rank,\nper element of the vector")
    panels[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def tables(title: str, found: list[dict]) -> str:
    """Two tables of one input: MB and messages; the model's milliseconds."""
    counts = sorted({row["ranks"] for row in found})
    cell = {(row["ranks"], row["name"]): row for row in found}
    names = list(STYLES)
    head = f"| ranks | {' | '.join(names)} |\n|{' --- |' * (len(names) + 1)}"
    numel, kept = found[0]["numel"], found[0]["kept"]
    lines = [
        f"**{title[0].upper()}{title[1:]}.** {numel:,} float32 elements, of which a rank keeps {kept:,}. MB that the "
        "busiest rank receives, and in parentheses the messages that it sends or waits for:",
        "", head,
    ]  # fmt: skip
    for ranks in counts:
        cells = (f"{shown(cell[ranks, n]['received'] / 1e6)} ({cell[ranks, n]['messages']:.0f})" for n in names)
        lines.append(f"| {ranks} | {' | '.join(cells)} |")
    about = " and ".join(label for label, _, _ in NETWORKS)
    lines += ["", f"Milliseconds of the model, at {about}:", "", head]
    for ranks in counts:
        cells = (", ".join(shown(milliseconds(cell[ranks, n], *net[1:])) for net in NETWORKS) for n in names)
        lines.append(f"| {ranks} | {' | '.join(cells)} |")
    return "\n".join(lines)


def text(results: dict[str, list[dict]], titles: dict[str, str], density: float) -> str:
    """The section of docs/densestream.md."""
    each = "\n\n".join(tables(titles[name], found) for name, found in results.items())
    return f"""\
`scripts/bench/simulate_scale.py --write` runs the real programs of hundreds of ranks in one process, without MPI. It
counts every message of a call: those of all slices, with their headers, and the small collectives: the allgather of the
cards, by recursive doubling; the agreement, and for DSA on more than two ranks the sums of the histogram, each as a
reduction and a broadcast over binomial trees, 2 ceil(log2 P) messages one after the other. The density is
{density:.0%}. `allgather` is what a job does by default: every rank's container goes to every rank, by P - 1 messages.
Its values are rounded (rice, 7-bit QSGD); those of the others are not. The allgather and the dense ring, 2 (P - 1)
messages, are computed and not simulated.

The model's time is alpha x messages + bytes / rate for the busiest rank. It is not a measurement: the work of the
processors, the overlap of slices, contention, and the messages of Horovod's coordinator are not in it. A slice has
about {densestream.SLICE_ELEMENTS:,} kept elements of a region, or up to {densestream.LONG_SLICE} times as many where
this makes more than {densestream.FEW_SLICES} slices: where each of 4 ranks keeps 255,570 elements, there are
{densestream.slice_count(255_570, 4)} slices, and one where the whole vector has a million elements.

{each}

![bytes per rank against ranks](results/figures/densestream_scale.png)"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", default="uniform,skewed,captured", help="comma-separated inputs; default: all")
    parser.add_argument("--file", type=Path, help="of captured accumulators; default: that of ResNet-50 at --density")
    parser.add_argument("--numel", type=int, default=1_000_000, help="elements of uniform and skewed vectors")
    parser.add_argument("--density", type=float, default=0.01, help="density of top-k, in (0, 1]")
    parser.add_argument("--ranks", default="2,4,16,64,256", help="comma-separated numbers of ranks")
    parser.add_argument("--output", type=Path, default=Path("runs/scale"), help="the results without .json and .png")
    parser.add_argument("--write", action="store_true", help="write the tables and the figure to docs/densestream.md")
    options = parser.parse_args()
    makers = {
        "uniform": lambda: Uniform(options.numel),
        "skewed": lambda: Skewed(options.numel),
        "captured": lambda: Captured(options.file or captured.path("resnet50", options.density)),
    }
    unknown = set(options.input.split(",")) - set(makers)
    if unknown:
        parser.error(f"--input has {', '.join(sorted(unknown))}; allowed are {', '.join(makers)}")
    results: dict[str, list[dict]] = {}
    titles = {}
    for name in options.input.split(","):
        given = makers[name]()
        titles[name] = str(given)
        counts = [int(ranks) for ranks in options.ranks.split(",") if int(ranks) <= given.most_ranks]
        kept = [given.kept(rank, options.density) for rank in range(max(counts))]
        results[name] = []
        for ranks in counts:
            for algorithm in STYLES:
                row = {"ranks": ranks, "name": algorithm, "numel": given.numel, "kept": int(kept[0].indices.size)}
                row |= simulate(algorithm, kept[:ranks])
                results[name].append(row)
                print(f"{name} {ranks:5d} ranks  {algorithm:16s} {row['messages']:7.0f} messages  "
                      f"{row['received'] / 1e6:9.2f} MB in  "
                      f"{', '.join(f'{milliseconds(row, *net[1:]):.2f} ms at {net[0]}' for net in NETWORKS)}",
                      flush=True)  # fmt: skip
    options.output.parent.mkdir(parents=True, exist_ok=True)
    about = {"density": options.density, "inputs": titles, "networks": NETWORKS}
    options.output.with_suffix(".json").write_text(json.dumps({**about, "results": results}, indent=1))
    draw(results, options.output.with_suffix(".png"))
    if options.write:
        draw(results, DOC.parent / "figures" / "densestream_scale.png")
        doc_sections.write(DOC, "scale", "How the exchanges scale", text(results, titles, options.density))


if __name__ == "__main__":
    main()
