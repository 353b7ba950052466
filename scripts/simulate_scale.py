#!/usr/bin/env python3
"""Counts the exact bytes and messages of every allreduce on up to 1,024 ranks, by simulating the ranks in one process.

    scripts/simulate_scale.py --ranks 2,4,8,16,32,64,128,256,512,1024 --density 0.01 --output runs/scale

Writes OUTPUT.json and OUTPUT.png: the bytes that the busiest rank receives, against the number of ranks. --gradient
FILE.npz names a file with arrays gradient_0, gradient_1, ... (scripts/capture_gradients.py writes such files); the
first --numel elements of each are used. Further ranks use the same arrays, shuffled within runs of 64 elements, so that
no two ranks keep the same elements. Without a file, the gradients are generated as in bench_net.py. The dense ring is
computed, not simulated: 2 (P - 1) / P N elements. Needs no MPI.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from bench_net import generated  # noqa: E402

from hvd_deepreduce.codec import RngKey  # noqa: E402
from hvd_deepreduce.exchange import costs, densestream, sparcml, topk_allgather  # noqa: E402
from hvd_deepreduce.exchange.simulation import Network, SimulatedTransport  # noqa: E402
from hvd_deepreduce.exchange.transport import Program  # noqa: E402
from hvd_deepreduce.joint.densestream import DenseStream  # noqa: E402
from hvd_deepreduce.joint.stream import Stream  # noqa: E402
from hvd_deepreduce.ops import select  # noqa: E402
from hvd_deepreduce.sparse import SparseTensor  # noqa: E402

STYLES = {"dense": "k--", "TopkA": "s-", "TopkDA split": "^-", "TopkDA doubling": "v-", "DSA": "o-", "DSA coded": "D-"}


class Gradients:
    """A gradient for each of any number of ranks."""

    def __init__(self, file: str | None, numel: int) -> None:
        self.numel, self.rows = numel, []
        if file:
            with np.load(file) as arrays:
                names = sorted((n for n in arrays.files if n.startswith("gradient_")), key=lambda n: int(n[9:]))
                self.rows = [arrays[name][:numel].astype(np.float32) for name in names]
            self.numel = self.rows[0].size

    def of(self, rank: int) -> np.ndarray:
        """The rank's gradient, the same at every call."""
        if not self.rows:
            return generated(self.numel, rank)
        row = self.rows[rank % len(self.rows)]
        if rank < len(self.rows):
            return row
        whole = row.size // 64 * 64
        order = np.random.default_rng(rank).permuted(row[:whole].reshape(-1, 64), axis=1).ravel()
        return np.concatenate([order, row[whole:]])

    def kept(self, rank: int, density: float) -> SparseTensor:
        """The top-k elements of the rank's gradient."""
        row = np.ascontiguousarray(self.of(rank))
        return SparseTensor(self.numel, *select.topk(np.zeros_like(row), row, max(1, int(density * self.numel))))


def programs_of(name: str, tensors: list[SparseTensor]):
    """The function that returns a rank's programs, for ``Network.run``."""
    numel, dtype, size = tensors[0].numel, tensors[0].values.dtype, len(tensors)
    slices = densestream.slice_count(max(tensor.indices.size for tensor in tensors), size)

    def ignore(rank: int, section: np.ndarray) -> None:
        pass

    if name == "TopkA":
        return lambda transport: [topk_allgather.program(transport, tensors[transport.rank], ignore)]
    if name == "TopkDA split":
        return lambda transport: sparcml.split_allgather(transport, tensors[transport.rank], slices, None)
    if name == "TopkDA doubling":
        return lambda transport: [sparcml.recursive_doubling(transport, tensors[transport.rank], None)]
    codec = DenseStream(coded=name == "DSA coded")
    totals = sum(densestream.share_boundaries(tensor, size * slices) for tensor in tensors)
    bounds = densestream.average_boundaries(totals, numel)

    def make(transport: SimulatedTransport) -> list[Program]:
        plan = densestream.Plan(codec, numel, dtype, bounds, slices, RngKey(0, 0, 0), None)
        return densestream.programs(transport, Stream.from_sparse(tensors[transport.rank], plan.gap), plan, None)

    return make


def simulate(name: str, tensors: list[SparseTensor]) -> dict[str, float]:
    """Messages and bytes of the busiest rank in one allreduce."""
    size, numel = len(tensors), tensors[0].numel
    if name == "dense":
        cost = costs.dense(size, numel)
        return {"messages": cost.messages, "received": 4 * cost.low, "sent": 4 * cost.low}
    network = Network(size)
    network.run(programs_of(name, tensors))
    return {
        "messages": int(network.messages.max()),
        "received": int(network.received.max()),
        "sent": int(network.sent.max()),
    }


def draw(results: list[dict], density: float, numel: int, source: str, path: Path) -> None:
    """Plots bytes per rank against ranks, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for name, style in STYLES.items():
        rows = [row for row in results if row["name"] == name]
        axes.plot([r["ranks"] for r in rows], [r["received"] / 1e6 for r in rows], style, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("ranks")
    axes.set_ylabel("MB received by the busiest rank")
    axes.set_title(f"{numel:,} elements ({source}), density {density:.0%}")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gradient", help="an .npz file of captured gradients; default: generated gradients")
    parser.add_argument("--numel", type=int, default=1_000_000, help="number of elements of a gradient")
    parser.add_argument("--density", type=float, default=0.01, help="density of top-k, in (0, 1]")
    parser.add_argument("--ranks", default="2,4,8,16,32,64,128,256,512,1024", help="comma-separated numbers of ranks")
    parser.add_argument("--output", type=Path, default=Path("runs/scale"), help="the results without .json and .png")
    options = parser.parse_args()
    gradients = Gradients(options.gradient, options.numel)
    counts = [int(ranks) for ranks in options.ranks.split(",")]
    kept = [gradients.kept(rank, options.density) for rank in range(max(counts))]
    results = []
    for ranks in counts:
        for name in STYLES:
            results.append({"ranks": ranks, "name": name, **simulate(name, kept[:ranks])})
            row = results[-1]
            print(f"{ranks:5d} ranks  {name:16s} {row['messages']:7.0f} messages  {row['received'] / 1e6:9.2f} MB in  "
                  f"{row['sent'] / 1e6:9.2f} MB out", flush=True)  # fmt: skip
    source = options.gradient or "generated"
    options.output.parent.mkdir(parents=True, exist_ok=True)
    about = {"numel": gradients.numel, "density": options.density, "gradient": source}
    options.output.with_suffix(".json").write_text(json.dumps({**about, "results": results}, indent=1))
    draw(results, options.density, gradients.numel, source, options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
