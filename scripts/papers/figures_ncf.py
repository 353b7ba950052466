"""Figures of neural collaborative filtering, whose gradients are sparse by themselves (DeepReduce, Table 2, Figure 11).

Ranks are simulated in one process, as in scripts/papers/figures_training.py.
"""

import sys
from functools import cache, partial
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("train",))

import figure_kit
import ncf
import numpy as np
import torch
from figure_kit import COLORS, Data, Figure, Picture, legend_below, picture, table
from simulated_ranks import DenseRanks, SimulatedRanks
from simulated_training import Network
from torch.nn import functional

from hvd_deepreduce import Config
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.exchange.costs import Cost, Link, dense
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.tools.measuring import timed
from hvd_deepreduce.wire.standalone import unpack

USERS, ITEMS, FACTORS, RANKS, FOLD, EPOCHS, RATE = 600, 360, 16, 2, 10, 3, 0.004
METHODS = {
    "dense": (None, 1.0, 0.9497),
    "BF-P2 with Fit-Poly": ("dr_bf_p2_fit_poly", 0.5879, 0.9519),
    "SKCompress": ("dr_skcompress", 0.2175, 0.9513),
    "BF-P0 with QSGD": ("dr_bf_p0_qsgd", 0.2063, 0.9496),
    "**ours**: `sparse_best`": ("sparse_best", None, None),
}
"""Preset, and the paper's volume and hit rate."""


class Job(Network):
    """NeuMF on one process, for ``ncf.hit_rate``."""

    def __init__(self, seed: int, users: int = USERS) -> None:
        torch.set_num_threads(1)
        self.ratings = ratings(seed, users)
        torch.manual_seed(seed)
        super().__init__(ncf.neumf(self.ratings, FACTORS))

    def mean_gradient(self, batches: list[tuple[np.ndarray, ...]]) -> np.ndarray:
        """The mean over some batches, float32 ``[numel]``."""
        self.model.zero_grad(set_to_none=True)
        for users, items, labels in batches:
            scores = self.model(torch.from_numpy(users), torch.from_numpy(items))
            loss = functional.binary_cross_entropy_with_logits(scores, torch.from_numpy(labels))
            (loss / len(batches)).backward()
        return torch.cat([p.grad.reshape(-1) for p in self.parameters]).numpy()

    def scores(self, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return self.model(torch.from_numpy(users), torch.from_numpy(items)).numpy()

    def mean(self, value: float, name: str) -> float:
        """Over the ranks, of which there is one."""
        return value


@cache
def ratings(seed: int, users: int) -> ncf.Ratings:
    return ncf.Ratings.generated(users, ITEMS * users // USERS, seed)


def train(config: str | None, seed: int, tiny: bool = False) -> Data:
    """One training: the hit rate after each epoch, the volume, and the mean share of zeros in a rank's gradient.
    ``tiny``: two steps."""
    epochs, users = (1, 60) if tiny else (EPOCHS, USERS)
    job = Job(seed, users)
    ranks = SimulatedRanks(Config.load(config), RANKS, job.sizes) if config else DenseRanks(RANKS)
    optimizer = torch.optim.Adam(job.parameters, RATE)
    rates, zeros, steps = [], [], 0
    for epoch in range(epochs):
        feeds = [job.ratings.batches(users // FOLD, rank, RANKS, (seed, epoch)) for rank in range(RANKS)]
        while True:
            batches = [list(islice(feed, FOLD)) for feed in feeds]
            if min(map(len, batches)) < FOLD or (tiny and steps == 2):
                break
            vectors = [job.mean_gradient(own) for own in batches]
            zeros.append(float(np.mean(vectors[0] == 0)))
            job.step(optimizer, ranks.mean(vectors))
            steps += 1
        rates.append(ncf.hit_rate(job, job.ratings, 0, 1))
    size = 4 * sum(job.sizes) * RANKS * steps
    volume = ranks.container_bytes / size if isinstance(ranks, SimulatedRanks) else 1.0
    return {"hit_rate": rates, "volume": volume, "zeros": mean(zeros), "steps": steps, "parameters": sum(job.sizes)}


SIZES = (53_000, 1_000_000, 4_000_000)


def volumes(numel: int) -> dict[str, float]:
    """The volume of each method for one tensor of Student's t (3 degrees of freedom), of which 40% are zeros."""
    rng = np.random.default_rng(0)
    gradient = (rng.standard_t(3, numel) * 1e-3).astype(np.float32)
    gradient[rng.random(numel) < 0.4] = 0
    return {
        name: unpack(Pipeline(Config.load(config)).encode(gradient, None, RngKey(0, 0, 0))).nbytes / gradient.nbytes
        for name, (config, _, _) in METHODS.items()
        if config
    }


def table_2(tiny: bool) -> Data:
    """Three seeds of each method, and volumes by the size of a tensor."""
    sizes = {str(numel): volumes(numel) for numel in (SIZES[:1] if tiny else SIZES)}
    if tiny:
        return {"runs": {name: [train(config, 0, True)] for name, (config, _, _) in METHODS.items()}, "sizes": sizes}
    runs = figure_kit.trainings(train, {name: (config,) for name, (config, _, _) in METHODS.items()}, 3)
    return {"runs": runs, "sizes": sizes}


def draw_table_2(data: Data) -> Picture:
    data = data["runs"]
    figure, (left, right) = picture(2, height=3.6)
    names = [name.replace("*", "").replace("`", "") for name in data]
    place = np.arange(len(names))
    volume = [mean(run["volume"] for run in runs) for runs in data.values()]
    printed = [METHODS[name][1] or np.nan for name in data]
    left.barh(place - 0.2, volume, 0.38, color=COLORS[0], label="here")
    left.barh(place + 0.2, printed, 0.38, color=COLORS[4], label="the paper")
    for where, value in (*zip(place - 0.2, volume, strict=True), *zip(place + 0.2, printed, strict=True)):
        if value == value:
            left.text(value + 0.01, where, f"{value:.3f}", va="center", fontsize=8)
    left.set(yticks=place, yticklabels=names, xlabel="volume, relative to dense", xlim=(0, 1.15))
    left.legend()
    for number, runs in enumerate(data.values()):
        best = [100 * max(run["hit_rate"]) for run in runs]
        right.plot(best, [place[number]] * len(best), "o", color=COLORS[0], alpha=0.7)
    right.set(yticks=place, yticklabels=[], xlabel="best hit rate at 10, % (each seed)")
    for axes in (left, right):
        axes.invert_yaxis()
    return figure


def table_2_text(data: Data) -> str:
    found, data, sizes = [], data["runs"], data["sizes"]
    for name, runs in data.items():
        best = [max(run["hit_rate"]) for run in runs]
        found.append([
            name, f"{mean(run['volume'] for run in runs):.4f}", METHODS[name][1],
            f"{mean(best):.3f} ({min(best):.3f} to {max(best):.3f})", METHODS[name][2],
        ])  # fmt: skip
    zeros = mean(run["zeros"] for runs in data.values() for run in runs)
    return (
        table(["method", "volume", "the paper's", "best hit rate, mean (of the seeds)", "the paper's"], found)
        + f"\n\n{zeros:.0%} of a rank's gradient are zeros (the paper: roughly 40%).\n\n"
        + table(["volume of one tensor", *(f"{int(numel):,} elements" for numel in sizes)], (
            [name, *(f"{found[name]:.4f}" for found in sizes.values())] for name in next(iter(sizes.values()))
        ))
        + "\n\nOne tensor of Student's t with 3 degrees of freedom, of which 40% are zeros. The paper's model has 31.8 "
        "million parameters. Fit-Poly sends the order of the values, in log2 of the tensor's size for each."
    )  # fmt: skip


# --- Figure 11: where a step's time goes

SPEEDS = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10}
NODES, ALPHA = 4, 50e-6
SENDERS = {
    "dense": None, "fp16": None, "Top-r, 10%": {"sparsifier": {"name": "topk", "density": 0.1}, "index": "raw",
                                               "value": "raw", "scope": "tensor"},
    "BF-P0 with QSGD": "dr_bf_p0_qsgd", "ours: sparse_best": "sparse_best",
}  # fmt: skip


def figure_11(tiny: bool) -> Data:
    """Seconds of computing, of encoding and decoding, and of the modelled network, of a rank's step."""
    repeats = 1 if tiny else 9
    job = Job(0, 60 if tiny else USERS)
    batch = list(islice(job.ratings.batches(len(job.ratings.test) // FOLD, 0, 1, (0, 0)), FOLD))
    optimizer = torch.optim.Adam(job.parameters, RATE)
    vector = job.mean_gradient(batch)
    (computing,) = timed(lambda: job.step(optimizer, job.mean_gradient(batch)), runs=repeats)
    (copying,) = timed(vector.copy, runs=50)
    ends = np.cumsum(job.sizes).tolist()
    parts = list(zip([0, *ends], ends, strict=False))
    out: Data = {"numel": vector.size, "copy": copying, "bars": []}

    def encode(pipeline: Pipeline, residual: np.ndarray | None) -> list[np.ndarray]:
        return [
            pipeline.encode(vector[a:b], None if residual is None else residual[a:b], RngKey(0, number, 0))
            for number, (a, b) in enumerate(parts)
        ]

    def decode(pipeline: Pipeline, containers: list[np.ndarray], decoded: np.ndarray) -> None:
        for (a, b), one in zip(parts, containers, strict=True):
            pipeline.decode([unpack(one)] * NODES, decoded[a:b], 1 / NODES)

    for name, settings in SENDERS.items():
        coding, sent = 0.0, 4.0 * vector.size
        if settings is not None:
            pipeline = Pipeline(Config.load(settings))
            residual = np.zeros_like(vector) if pipeline.config.error_feedback else None
            containers = encode(pipeline, residual)
            sent = float(sum(one.size for one in containers))
            coding = sum(timed(partial(encode, pipeline, residual), runs=repeats))
            coding += sum(timed(partial(decode, pipeline, containers, np.zeros_like(vector)), runs=repeats))
        for speed, bits in SPEEDS.items():
            if settings is None:
                cost = dense(NODES, (2 if name == "fp16" else 4) * vector.size)
            else:
                cost = Cost(NODES - 1, (NODES - 1) * sent)
            network = cost.seconds(Link(bits, ALPHA))
            out["bars"].append({"method": name, "speed": speed, "computing": computing, "coding": coding,
                                "network": network})  # fmt: skip
    return out


PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "computing": ("computing, measured", {"color": COLORS[0]}),
    "coding": ("encoding and decoding, measured", {"color": COLORS[1]}),
    "network": ("network, cost model", {"color": COLORS[2], "hatch": "///"}),
    "waiting": ("network and waiting, measured", {"color": COLORS[2]}),
}


def draw_bars(data: Data) -> Picture:
    """Stacked bars for each speed, as multiples of the dense step. A modelled part is hatched."""
    speeds = list(dict.fromkeys(bar["speed"] for bar in data["bars"]))
    figure, panels = picture(len(speeds), height=3.8, sharey=True)
    highest = 0.0
    for axes, speed in zip(panels, speeds, strict=True):
        own = [bar for bar in data["bars"] if bar["speed"] == speed]
        whole = total(own[0])
        for place, bar in enumerate(own):
            bottom = 0.0
            for part, (_, style) in PARTS.items():
                height = bar.get(part, 0.0) / whole
                axes.bar(place, height, 0.7, bottom, edgecolor="white", lw=0.5, **style)
                bottom += height
            highest = max(highest, bottom)
            axes.text(place, bottom + 0.015, f"{bottom:.2f}", ha="center", fontsize=8)
        axes.set_xticks(range(len(own)), [bar["method"] for bar in own], rotation=35, ha="right", fontsize=8)
        axes.set(title=f"{speed}, dense step {1000 * whole:,.0f} ms")
    panels[0].set(ylabel="time of a step / dense step", ylim=(0, 1.1 * highest))
    for part, (label, style) in PARTS.items():
        if any(bar.get(part) for bar in data["bars"]):
            panels[0].bar(0, 0, edgecolor="white", label=label, **style)
    legend_below(figure, panels[0], 4)
    return figure


def total(bar: Data) -> float:
    """Seconds of a step."""
    return sum(float(bar.get(part, 0.0)) for part in PARTS)


def bars_table(data: Data) -> str:
    """Each method's step relative to dense, and how its time divides."""
    speeds = list(dict.fromkeys(bar["speed"] for bar in data["bars"]))
    found = []
    for name in dict.fromkeys(bar["method"] for bar in data["bars"]):
        row = [name]
        for speed in speeds:
            own = {bar["method"]: bar for bar in data["bars"] if bar["speed"] == speed}
            whole = total(own[name])
            shares = [own[name].get(part, 0.0) / whole for part in ("computing", "coding")]
            row.append(f"{whole / total(own['dense']):.2f} ({shares[0]:.0%} + {shares[1]:.0%} + {1 - sum(shares):.0%})")
        found.append(row)
    return table(["step / dense step (computing + coding + network)", *speeds], found)


FIGURES = [
    Figure(
        "deepreduce_table_2", "NCF: volume and hit rate", ("DeepReduce Table 2", "appendix Table 6"), table_2,
        draw_table_2, table_2_text, 7,
    ),
    Figure(
        "deepreduce_11", "NCF: where the time of a step goes", ("DeepReduce Figure 11", "appendix Figure 19"),
        figure_11, draw_bars, bars_table, 1, True,
    ),
]  # fmt: skip
