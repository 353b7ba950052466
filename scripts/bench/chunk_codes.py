"""Bytes of top-k in chunks: each index codec, and the preset sparseloco beside the published wire format.

    python scripts/bench/chunk_codes.py

The supports are random ones, k of each chunk, and those of real updates: two workers train a perceptron on handwritten
digits with AdamW, and send their updates by the preset ``sparseloco``. The bound is log2 C(chunk, k) bits a chunk. The
published format is counted for the same indices and the same decoded values.
"""

import sys
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Annotated

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("train",))

import numpy as np
import numpy.typing as npt
import torch
import typer
from local_updates import LocalUpdates
from simulated_ranks import SimulatedRanks
from simulated_training import Network
from sklearn.datasets import load_digits
from torch.nn import functional

from hvd_deepreduce import Config
from hvd_deepreduce.codecs.interfaces import RngKey, index_codecs
from hvd_deepreduce.codecs.sparsify.chunk_topk import ChunkTopK
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.tools.measuring import entropy_bits

KEY = RngKey(1, 2, 3)
LOCAL_STEPS, DECAY = 4, 0.95
LOSSLESS = ("packed", "elias_fano", "delta", "rice", "rans", "auto")


def published_bytes(count: int, chunk: int = 4096, tables: int = 1) -> int:
    """Bytes of SparseLoCo's wire format: an index within its chunk, two bits for a value, four float32 a table.

    Args:
        count: elements that are sent.
        chunk: elements of a chunk.
        tables: of the values that two bits can stand for; one for each tensor.
    """
    return ceil(count * ((chunk - 1).bit_length() + 2) / 8) + 16 * tables


def bound(indices: npt.NDArray[np.uint32], numel: int, chunk: int = 4096) -> float:
    """Bits of an enumerative code of each chunk whose number of indices is known."""
    counts = np.bincount(indices // chunk, minlength=-(-numel // chunk)).tolist()
    return sum(entropy_bits(min(chunk, numel - i * chunk), k) for i, k in enumerate(counts))


def random_support(numel: int, k: int, chunk: int = 4096, seed: int = 0) -> npt.NDArray[np.uint32]:
    """k of each chunk, of which ``numel`` has a whole number."""
    rng = np.random.default_rng(seed)
    chunks = [rng.choice(chunk, k, replace=False) + begin for begin in range(0, numel, chunk)]
    return np.sort(np.concatenate(chunks)).astype(np.uint32)


def perceptron() -> torch.nn.Sequential:
    """301,066 parameters."""
    linear, relu = torch.nn.Linear, torch.nn.ReLU
    return torch.nn.Sequential(linear(64, 512), relu(), linear(512, 512), relu(), linear(512, 10))


def accumulators(rounds: int, seed: int = 0) -> tuple[list[npt.NDArray[np.float32]], list[int]]:
    """What each of two workers selects from in the last round, and the sizes of the tensors."""
    torch.manual_seed(seed)
    images, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    images = images.float() / 16
    networks = [Network(perceptron()) for _ in range(2)]
    optimizers = [torch.optim.AdamW(one.parameters, lr=1e-3) for one in networks]
    job = SimulatedRanks("sparseloco", 2, networks[0].sizes)
    updates = LocalUpdates(job, networks[0].vector(), DECAY)
    selected: list[npt.NDArray[np.float32]] = []
    for _ in range(rounds):
        for local, network, optimizer in zip(updates.local, networks, optimizers, strict=True):
            network.load(local)
            for _ in range(LOCAL_STEPS):
                some = torch.randint(len(labels), (32,))
                optimizer.zero_grad()
                functional.cross_entropy(network.model(images[some]), labels[some]).backward()
                optimizer.step()
            local[:] = network.vector()
        decayed = [np.float32(DECAY) * residual for residual in job.residuals]
        selected = [memory + update for memory, update in zip(decayed, updates.anchors - updates.local, strict=True)]
        updates.synchronise()
    return selected, networks[0].sizes


def sizes_of(name: str, indices: npt.NDArray[np.uint32], numel: int) -> Iterator[str]:
    """A table's rows: bits an index of each codec."""
    least = bound(indices, numel)
    yield f"{name}: {indices.size} of {numel}; bound {least / indices.size:.4f} bits an index"
    for codec in LOSSLESS:
        bits = 8 * index_codecs.by_name[codec]().encode(indices, numel, KEY)[0].size  # type: ignore[attr-defined]
        yield f"  {codec:<10} {bits / indices.size:7.4f} bits an index, {bits / least:.4f} of the bound"


def formats(vector: npt.NDArray[np.float32]) -> str:
    """The preset's container and the published format, for the same updates of one vector."""
    config = Config.load("sparseloco")
    ours = Pipeline(config).encode(vector, None, KEY, version=2).size
    count = ChunkTopK().select(vector.copy(), None, KEY, 1)[0].size
    theirs = published_bytes(count)
    return (
        f"  {ours} bytes, {8 * ours / count:.3f} bits an element; published format {theirs} bytes, "
        f"{8 * theirs / count:.3f}: ratio {ours / theirs:.4f}"
    )


def main(
    rounds: Annotated[int, typer.Option(min=1, help="rounds of four steps before the updates are measured")] = 25,
) -> None:
    """Prints bits an index of each codec, and bytes of both formats."""
    for chunks in (4, 16, 160, 1600):
        numel = 4096 * chunks
        print(*sizes_of(f"random, {chunks} chunks", random_support(numel, 64), numel), sep="\n")
        print(formats(np.random.default_rng(1).standard_normal(numel).astype(np.float32)))
    vectors, _ = accumulators(rounds)
    for number, vector in enumerate(vectors):
        indices, _ = ChunkTopK().select(vector.copy(), None, KEY, 1)
        print(*sizes_of(f"updates of worker {number}, round {rounds}", indices, vector.size), sep="\n")
        print(formats(vector))


if __name__ == "__main__":
    typer.run(main)
