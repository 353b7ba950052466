"""What the input of a benchmark changes: one codec on raw gradients, accumulators, generated and random supports.

The section `inputs` of scripts/bench/bench.py (bytes only, no times), and the captured vectors of its other sections.
"""

from collections.abc import Iterator

import captured
import numpy as np
from capture_gradients import capture

from hvd_deepreduce.codecs.interfaces import U32, Floats, index_codecs
from hvd_deepreduce.codecs.joint.densestream import DenseStream
from hvd_deepreduce.ops import select
from hvd_deepreduce.tools.gradients import generated
from hvd_deepreduce.tools.measuring import KEY, entropy_bits

NETWORK = "resnet50"
RANKS = 4
"""Of which the union of the supports is counted."""
INDEX_CODECS = ("rice", "rans", "rle")


def vector(kind: str, density: float, rank: int = 0, selection: str = "scope") -> captured.Vector:
    """A captured vector of ResNet-50, ``[numel]``. If the file does not exist, a training captures it."""
    path = captured.path(NETWORK, density, selection)
    if not path.exists():
        capture(NETWORK, path, density=density, selection=selection)
    return captured.read(path, kind, rank)


def described(kind: str, density: float, selection: str = "scope") -> str:
    """What ``vector`` returns, in words."""
    vector(kind, density, 0, selection)
    return captured.describe(captured.path(NETWORK, density, selection), kind)


def random_subset(d: int, r: int, seed: int | None = None) -> U32:
    """``r`` of ``d`` indices, sorted."""
    rng = np.random.default_rng(r if seed is None else seed)
    return np.sort(rng.choice(d, r, replace=False).astype(np.uint32))


INPUTS = {
    "accumulator": "accumulators", "gradient": "raw gradients", "clusters": "generated clusters",
    "random": "random positions",
}  # fmt: skip


def selected(kind: str, density: float, numel: int, rank: int) -> tuple[U32, Floats]:
    """The indices and values that a rank sends of a kind of input."""
    kept = int(numel * density)
    if kind == "random":
        return random_subset(numel, kept, rank), np.ones(kept, np.float32)
    return select.topk(generated(numel, rank) if kind == "clusters" else vector(kind, density, rank), None, kept)


def rows(densities: tuple[float, ...]) -> Iterator[list[str]]:
    """The head and the rows of a table: bits of index codecs, DenseStream, and the overlap of the ranks."""
    yield ["density", "support of", *(f"{name}, bits" for name in INDEX_CODECS), "random subset, bits",
           "DenseStream plain / key-value", "coded / key-value", f"union of {RANKS} ranks / kept"]  # fmt: skip
    for density in densities:
        numel = vector("gradient", density).size
        for kind, label in INPUTS.items():
            union = np.zeros(numel, bool)
            for rank in range(RANKS)[::-1]:
                indices, values = selected(kind, density, numel, rank)
                union[indices] = True
            kept = indices.size
            bits = [8 * index_codecs.by_name[name]().encode(indices, numel, KEY)[0].size for name in INDEX_CODECS]
            streams = [DenseStream(coded=coded).encode(indices, values, numel, KEY)[0].size for coded in (False, True)]
            yield [
                f"{density:.1%}", label, *(f"{size / kept:.2f}" for size in bits),
                f"{entropy_bits(numel, kept) / kept:.2f}", *(f"{size / (8 * kept):.2f}" for size in streams),
                f"{union.sum() / kept:.2f}",
            ]  # fmt: skip
