"""Figures of trainings: Bloom filters (DeepReduce), DenseStream, and SKCompress of a neural network.

All ranks of a job are simulated in one process (scripts/train/simulated_ranks.py) with real containers and residuals,
so these figures have bytes and results, and no times.
"""

import sys
from collections.abc import Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("train", "arena"))

import figure_kit
import numpy as np
import simulated_training
import torch
from figure_kit import COLORS, MARKERS, Data, Figure, Picture, curves, depth, legend_below, picture, table
from mnist import mnist_5k
from simulated_ranks import DenseRanks, SimulatedRanks
from simulated_training import Network
from torch import nn
from torch.nn import functional
from train_torch import ResNet
from tuning import Scale, Tuned, search

from hvd_deepreduce import Config
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.pipeline import Pipeline

RANKS, BATCH, EPOCHS, WIDTH, RATE = 4, 16, 6, 16, 0.05
Settings = str | dict[str, Any] | None


class Vgg(nn.Module):
    """3 x 3 convolutions, pooling and two wide layers, without normalization, as VGG16; for 14 x 14 grey images."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 1
        for outputs in (width, 2 * width):
            for _ in range(2):
                layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
                inputs = outputs
            layers.append(nn.MaxPool2d(2))
        wide = [nn.Flatten(), nn.Linear(inputs * 9, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)]
        self.layers = nn.Sequential(*layers, *wide)
        for part in self.layers:
            if isinstance(part, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(part.weight, nonlinearity="relu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def resnet() -> nn.Module:
    return ResNet(WIDTH)


MODELS = {"resnet": resnet, "resnet under Adam": resnet, "vgg": Vgg}
RATES = {"resnet": RATE, "resnet under Adam": 0.003, "vgg": 0.02}
"""The largest learning rate of SGD with momentum, or of Adam."""


@cache
def images() -> tuple[torch.Tensor, ...]:
    """Training images, labels, test images, labels; 2 x 2 pixels are averaged."""
    train, labels, test, test_labels = (torch.from_numpy(part) for part in mnist_5k())
    small = [functional.avg_pool2d(part.reshape(-1, 1, 28, 28), 2) * 2 - 0.5 for part in (train, test)]
    return small[0], labels, small[1], test_labels


class Placed(SimulatedRanks):
    """Ranks that note where in the model lies what they send.

    Attributes:
        layers: of each step, the elements of each tensor that a rank or more have sent.
    """

    def __init__(self, config: Config, ranks: int, sizes: Sequence[int]) -> None:
        super().__init__(config, ranks, sizes)
        self._ends, self.layers = np.cumsum(sizes), list[Any]()

    def mean(self, vectors: Sequence[Any], decay: float = 1.0) -> Any:
        found = super().mean(vectors, decay)
        of = np.searchsorted(self._ends, np.flatnonzero(found), side="right")
        self.layers.append(np.bincount(of, minlength=self._ends.size))
        return found


def train(
    settings: Settings, model_name: str, seed: int, tiny: bool = False, epochs: int = EPOCHS, rate: float | None = None,
    kind: type[SimulatedRanks] = SimulatedRanks,
) -> Data:  # fmt: skip
    """One training: test accuracy and training loss after each epoch, and the volume. ``tiny``: one step. Without a
    rate: that of the model. With ``kind`` ``Placed``: what is sent of each layer's weights in an epoch's step, too."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    epochs, batch = (1, 2) if tiny else (epochs, BATCH)
    data = [part[: RANKS * batch] if tiny else part for part in images()]
    steps = len(data[0]) // (RANKS * batch)
    network = Network(MODELS[model_name]())
    ranks = DenseRanks(RANKS) if settings is None else kind(
        Config.load(settings).model_copy(update={"seed": seed}), RANKS, network.sizes)  # fmt: skip
    rate = rate or RATES[model_name]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(network.parameters, rate, momentum=0.9, weight_decay=5e-4)
    if "Adam" in model_name:
        optimizer = torch.optim.Adam(network.parameters, rate, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=epochs * steps, cycle_momentum=False)
    found = simulated_training.epochs(network, ranks, optimizer, schedule, data, epochs, batch, seed)
    accuracies, losses = zip(*found, strict=True)
    numel = sum(network.sizes)
    volume = 1.0 if settings is None else ranks.container_bytes / (4 * numel * RANKS * epochs * steps)
    kept = {}
    if isinstance(ranks, Placed):
        weights = [number for number, one in enumerate(network.parameters) if one.dim() > 1]
        each = np.reshape(ranks.layers, (epochs, steps, -1)).mean(1)[:, weights]
        kept = {"kept": (each / np.array(network.sizes)[weights]).tolist()}
    losses = list(map(mean, losses))
    return {"accuracy": list(accuracies), "loss": losses, "volume": volume, "parameters": numel, **kept}


def trainings(methods: dict[str, Settings], seeds: int, tiny: bool, model: str = "resnet") -> Data:
    """Trains with each method and seed, some at a time. Returns the runs of each method."""
    if tiny:
        return {name: [train(given, model, 0, tiny)] for name, given in methods.items()}
    return figure_kit.trainings(train, {name: (given, model) for name, given in methods.items()}, seeds)


def final(runs: list[Data]) -> tuple[float, float, float]:
    """Mean, least and greatest accuracy after the last epoch."""
    ends = [run["accuracy"][-1] for run in runs]
    return mean(ends), min(ends), max(ends)


def volume(runs: list[Data]) -> float:
    """The mean of the runs."""
    return mean(run["volume"] for run in runs)


def rows(data: Data) -> Iterable[list[Any]]:
    """Of a table: method, volume, accuracy with its range, and the steps' accuracy after the second epoch."""
    for name, runs in data.items():
        middle, low, high = final(runs)
        early = mean(run["accuracy"][min(1, len(run["accuracy"]) - 1)] for run in runs)
        yield [name, f"{volume(runs):.2%}", f"{early:.1%}",
               f"{middle:.1%} ({low:.1%} to {high:.1%})"]  # fmt: skip


HEAD = ["method", "volume", "accuracy after 2 epochs", "at the end, mean (of the seeds)"]


def by_epoch(name: str, runs: list[Data], key: str, factor: float = 1) -> tuple[str, Any, Any]:
    """The mean of the runs, for ``curves``."""
    values = factor * np.mean([run[key] for run in runs], 0)
    return name, range(1, values.size + 1), values


def lines(data: Data, title: str) -> Picture:
    """Accuracy by epoch at the left, at the right the end of each run against its volume."""
    figure, (left, right) = picture(2, height=4.6)
    curves(left, (by_epoch(name, runs, "accuracy", 100) for name, runs in data.items()))
    curves(right, (
        (name, [100 * run["volume"] for run in runs], [100 * run["accuracy"][-1] for run in runs])
        for name, runs in data.items()
    ), ls="")  # fmt: skip
    left.set(xlabel="epoch", ylabel="test accuracy, %", title="mean of the seeds")
    right.set(xlabel="volume, % of dense (log)", ylabel="final test accuracy, %", xscale="log", title="each seed")
    right.xaxis.set_major_formatter("{x:g}")
    figure.suptitle(title)
    legend_below(figure, left, 6 if max(map(len, data)) < 12 else 4)
    return figure


# --- DeepReduce Figure 6: policies and false positive rates


def bloom(policy: str, fpr: float = 0.001) -> dict[str, Any]:
    """Raw values of the top 1% of each tensor, and the paper's Bloom filter."""
    index = {"name": "bloom", "policy": policy, "fpr": fpr, "tries": 1}
    return {"sparsifier": {"name": "topk", "density": 0.01}, "index": index, "value": "raw", "scope": "tensor"}


FPRS = (0.0001, 0.001, 0.01, 0.1)
LONG = 18
"""Epochs of Figure 6."""
FIRST_RATES = {"dense": 0.1, "Top-r": 0.05, "Random-r": 0.0125}
"""With which the search of a learning rate begins, in ratios of 2."""
TUNING_SEED = 100


def fpr_methods() -> dict[str, dict[str, Settings]]:
    """Figure 6: each policy, false positive rate and sparsifier, and both sparsifiers by themselves; dense is one, too.
    By the sparsifiers' names."""
    own: dict[str, dict[str, Settings]] = {"dense": {"dense": None}}
    for label, sparsifier in (("Top-r", "topk"), ("Random-r", "randomk")):
        chosen = {"sparsifier": {"name": sparsifier, "density": 0.01}}
        own[label] = {label: {**bloom("p0"), **chosen, "index": "raw"}}
        for policy in ("p0", "p1", "p2"):
            for fpr in FPRS:
                own[label][f"{label} {policy} {fpr:g}"] = {**bloom(policy, fpr), **chosen}
    return own


def train_long(settings: Settings, rate: float, seed: int) -> Data:
    """A training of Figure 6."""
    return train(settings, "resnet", seed, epochs=LONG, rate=rate)


def crossing(numel: int) -> float:
    """The false positive rate at which BF-P0 sends as many bytes as the sparse input, keys and values of 32 bits each;
    of the largest 1% of normal variates."""
    gradient = np.random.default_rng(0).standard_normal(numel).astype(np.float32)

    def size(settings: dict[str, Any]) -> int:
        config = Config.load({**settings, "error_feedback": False})
        return Pipeline(config, 1).encode(gradient, None, RngKey(0, 0, 0)).size

    low, high, sparse = 0.001, 0.1, size({**bloom("p0"), "index": "raw"})
    while high > 1.005 * low:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if size(bloom("p0", middle)) < sparse else (low, middle)
    return high


def best_rate(name: str, settings: Settings) -> float:
    """The learning rate of the highest accuracy at the end, on a seed that is not reported."""
    looking = search({"rate": Scale(FIRST_RATES[name])}, trials=10)
    points = next(looking)
    try:
        while True:
            given = {str(point): (settings, point["rate"]) for point in points}
            runs = figure_kit.trainings(train_long, given, first=TUNING_SEED)
            points = looking.send([-final(runs[str(point)])[0] for point in points])
    except StopIteration as end:
        found: Tuned = end.value
    if found.at_edge:
        raise RuntimeError(f"{name}: no best learning rate in {found.trials} trials")
    return float(found.settings["rate"])


def figure_6(tiny: bool) -> Data:
    """The trainings, each at the best learning rate of its sparsifier alone, and where BF-P0 stops to save bytes."""
    methods = fpr_methods()
    if tiny:
        runs = {name: one for own in methods.values() for name, one in trainings(own, 1, tiny).items()}
        return {**runs, "rates": FIRST_RATES, "crossing": crossing(10_000)}
    rates = {name: best_rate(name, own[name]) for name, own in methods.items()}
    given = {name: (one, rates[label]) for label, own in methods.items() for name, one in own.items()}
    return {**figure_kit.trainings(train_long, given, 3), "rates": rates, "crossing": crossing(1_000_000)}


def draw_fpr(data: Data) -> Picture:
    figure, panels = picture(3, 2, height=6.2, sharex=True)
    for column, policy in enumerate(("p0", "p1", "p2")):
        for number, label in enumerate(("Top-r", "Random-r")):
            style = {"color": COLORS[number], "marker": MARKERS[number]}
            names = (*(f"{label} {policy} {fpr:g}" for fpr in FPRS), label)
            for row, what in enumerate((lambda runs: final(runs)[0], volume)):
                values = [100 * what(data[name]) for name in names]
                panels[row, column].plot(FPRS, values[:-1], label=f"{label} with BF-{policy.upper()}", **style)
                panels[row, column].axhline(values[-1], color=COLORS[number], ls="--", lw=1, label=f"{label} alone")
        panels[0, column].axhline(100 * final(data["dense"])[0], color="black", lw=1, ls=":", label="dense")
        panels[0, column].set_title(f"policy {policy.upper()}")
        panels[1, column].set(xscale="log", yscale="log", xlabel="false positive rate")
    for row, label in enumerate(("final test accuracy, %", "volume, % of dense (log)")):
        limits = [axes.get_ylim() for axes in panels[row]]
        for axes in panels[row]:
            axes.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
        panels[row, 0].set_ylabel(label)
    for axes in panels[1]:
        axes.set_yticks([1, 2, 5, 10], ["1", "2", "5", "10"])
        axes.minorticks_off()
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, [one.replace(" with BF-P0", " with the filter") for one in labels],
                  loc="outside lower center", ncols=5, frameon=False)  # fmt: skip
    return figure


def fpr_table(data: Data) -> str:
    found = []
    for label, own in fpr_methods().items():
        for name in own:
            _, *policy = name.split()
            words = f"{label}, BF-{policy[0].upper()}" if policy else label
            middle, low, high = final(data[name])
            found.append([words, policy[1] if policy else "none", f"{volume(data[name]):.2%}",
                          f"{middle:.1%} ({low:.1%} to {high:.1%})"])  # fmt: skip
    rates = ", ".join(f"{name} {rate:g}" for name, rate in data["rates"].items())
    return table(["sparsifier, policy", "false positive rate", "volume", "accuracy"], found) + (
        f"\n\nThe best learning rate of each sparsifier alone, in ratios of 2, by the accuracy of seed {TUNING_SEED}: "
        f"{rates}."
        "\n\nThe paper prints no numbers, but that BF-P0 sends more than the sparse input from a rate of 0.004 on, "
        "that the volume of P1 and P2 falls with the rate, and that P1 loses accuracy. Here BF-P0 sends more from "
        f"a rate of {data['crossing']:.4f} on, for the largest 1% of a million normal variates."
    )


STREAMS: dict[str, Settings] = {
    "dense": None,
    **{f"DenseStream, {density:.0%}": {"sparsifier": {"name": "topk", "density": density}, "joint": "densestream",
                                       "scope": "model"} for density in (0.05, 0.01)},
}  # fmt: skip
LAYERS = ("convolution 1", "convolution 2", "convolution 3", "convolution 4", "wide 1", "wide 2", "classification")
"""Of ``Vgg``."""


def placed(tiny: bool) -> Data:
    """Trainings of ``STREAMS`` at 1%, and where the elements are that are sent."""
    given = (STREAMS["DenseStream, 1%"], "vgg")
    if tiny:
        return {"runs": [train(*given, 0, True, kind=Placed)]}
    return {"runs": figure_kit.trainings(partial(train, kind=Placed), {"1%": given}, 3)["1%"]}


def draw_placed(data: Data) -> Picture:
    figure, axes = picture(width=7.5)
    kept = 100 * np.mean([run["kept"] for run in data["runs"]], 0)
    curves(axes, ((name, range(1, 1 + len(kept)), kept[:, number]) for number, name in enumerate(LAYERS)))
    axes.set(xlabel="epoch", ylabel="sent of a layer's weights in a step, %", yscale="log", ylim=(1, 100))
    axes.yaxis.set_major_formatter("{x:g}")
    legend_below(figure, axes, 4)
    return figure


def placed_table(data: Data) -> str:
    kept = np.mean([run["kept"] for run in data["runs"]], 0)
    lines = [[name, *(f"{one:.1%}" for one in kept[:, number])] for number, name in enumerate(LAYERS)]
    centres = np.mean([[depth(one) for one in run["kept"]] for run in data["runs"]], 0)
    head = ["layer", *(f"epoch {1 + number}" for number in range(len(kept)))]
    return table(head, [*lines, ["mean depth", *(f"{one:.2f}" for one in centres)]])


DENSE_SKETCHES: dict[str, Settings] = {
    "dense": None, "SKCompress, 16 buckets": "skcompress_dense",
    "the same, with error feedback": {
        "sparsifier": "none", "joint": {"name": "skcompress", "buckets": 16, "groups": 1, "center": "middle"},
        "scope": "tensor",
    },
    "ours: top 1%, `recommended`": "recommended",
}  # fmt: skip


def draw_losses(data: Data) -> Picture:
    figure, (left, right) = picture(2, height=4)
    for axes, key, factor in ((left, "loss", 1), (right, "accuracy", 100)):
        curves(axes, (by_epoch(name, runs, key, factor) for name, runs in data.items()))
    left.set(xlabel="epoch", ylabel="training loss, nats (log)", yscale="log")
    right.set(xlabel="epoch", ylabel="test accuracy, %")
    legend_below(figure, left, 3)
    return figure


def in_rows(data: Data) -> str:
    return table(HEAD, rows(data))


FIGURES = [
    Figure(
        "deepreduce_6", "The false positive rate of a Bloom filter", ("DeepReduce Figure 6", "appendix Figure 15"),
        figure_6, draw_fpr, fpr_table, 45,
    ),
    Figure(
        "densestream_5", "DenseStream's training loss", ("DenseStream Figure 5",),
        lambda tiny: trainings(STREAMS, 3, tiny, "vgg"), draw_losses, in_rows, 3,
    ),
    Figure(
        "densestream_1_epochs", "Where the large elements are in a whole training", ("DenseStream Figure 1",),
        placed, draw_placed, placed_table, 2,
    ),
    Figure(
        "skcompress_16", "SKCompress of a neural network's dense gradients", ("SKCompress Figure 16",),
        lambda tiny: trainings(DENSE_SKETCHES, 2, tiny, "resnet under Adam"),
        lambda data: lines(data, "SKCompress on a ResNet under Adam"), in_rows, 4,
    ),
]  # fmt: skip
