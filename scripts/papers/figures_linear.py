"""Figures of sparse linear models that linear.md lacks: SKCompress's Figures 13 to 15, 17, 18, Tables 6 and 7."""

import sys
import time
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("train",))

import linear_data
import linear_figures
import numpy as np
from figure_kit import COLORS, MARKERS, Figure, Picture, curves, legend_below, picture, table
from linear_figures import PUBLISHED, RAW_KEYS, SKCOMPRESS
from linear_models import LOSSES, Model
from sklearn.linear_model import SGDClassifier, SGDRegressor

Runs = dict[str, Any]
SCALE, EPOCHS = 100, 8


def sketch(**changes: Any) -> dict[str, Any]:
    """SKCompress with other settings than the paper's defaults."""
    return {**SKCOMPRESS, "joint": {**SKCOMPRESS["joint"], **changes}}


def uniform(bits: int) -> dict[str, Any]:
    return {**RAW_KEYS, "value": {"name": "uniform", "bits": bits, "bucket_size": 2**31}}


def qsgd(bits: int) -> dict[str, Any]:
    return {**RAW_KEYS, "value": {"name": "qsgd", "bits": bits, "bucket_size": 2**31, "norm": "l2"}}


PANELS: dict[str, dict[str, tuple[dict[str, Any], str]]] = {
    "sensitivity (Figure 15)": {
        "SKCompress": (SKCOMPRESS, "adam"), "256 buckets": (sketch(buckets=256), "adam"),
        "4 rows": (sketch(rows=4), "adam"), "d / 2 columns": (sketch(columns=0.5), "adam"),
    },
    "precision (Figure 17, Table 7)": {
        "Adam, float32": (PUBLISHED["Adam, float32"], "adam"), "QSGD, 8 bits": (qsgd(8), "adam"),
        "QSGD, 4 bits": (qsgd(4), "adam"), "ZipML, 16 bits": (uniform(16), "adam"),
        "ZipML, 8 bits": (uniform(8), "adam"), "SKCompress": (SKCOMPRESS, "adam"),
    },
    "optimizer (Figure 18)": {
        "Adam": (PUBLISHED["Adam, float32"], "adam"), "AMSGrad": (PUBLISHED["Adam, float32"], "amsgrad"),
        "Adam, SKCompress": (SKCOMPRESS, "adam"), "AMSGrad, SKCompress": (SKCOMPRESS, "amsgrad"),
    },
}  # fmt: skip


def figure_15(tiny: bool) -> Runs:
    """Of each panel and method, at the best of ``END_RATES``: the loss after each epoch and the bytes of an epoch; and
    its lowest loss at Adam's rate."""
    data = linear_figures.Data.made(10_000 if tiny else SCALE, 2 if tiny else 10)
    epochs, out, known = 1 if tiny else EPOCHS, {}, {}
    common = linear_figures.RATES["lr"]

    def at_best(name: str, settings: dict[str, Any], optimizer: str) -> Runs:
        if tiny:
            rate, runs = common, {common: linear_figures.train(data, settings, "lr", epochs, 1.0, optimizer)}
        else:
            rate, runs = linear_figures.at_best_rate(f"{name}: rate", data, settings, epochs, optimizer)
        rows = runs[rate]
        return {"loss": [row.loss for row in rows], "bytes": rows[-1].sent / epochs, "rate": rate,
                "common": linear_figures.lowest(runs[common])}  # fmt: skip

    for panel, methods in PANELS.items():
        out[panel] = {}
        for name, (settings, optimizer) in methods.items():
            key = (str(settings), optimizer)
            if key not in known:
                known[key] = at_best(name, settings, optimizer)
            out[panel][name] = known[key]
    return out


def draw_15(data: Runs) -> Picture:
    figure, panels = picture(3, height=4.2, sharey=True)
    for axes, (panel, methods) in zip(panels, data.items(), strict=True):
        for number, (name, run) in enumerate(methods.items()):
            losses = run["loss"]
            hidden = any(one["loss"] == losses for one in list(methods.values())[:number])
            axes.plot(range(1, len(losses) + 1), losses, label=name, color=COLORS[number], marker=MARKERS[number],
                      ls="--" if number % 2 else "-", fillstyle="none" if hidden else "full",
                      ms=9 if hidden else 6)  # fmt: skip
        axes.set(xlabel="epoch", title=panel)
        axes.legend(fontsize=8)
    panels[0].set_ylabel("test loss")
    return figure


def table_15(data: Runs) -> str:
    found = []
    for panel, methods in data.items():
        for name, run in methods.items():
            losses = [f"{loss:.4f}" for loss in (run["common"], min(run["loss"]), run["loss"][-1])]
            found.append([panel, name, f"{run['bytes'] / 1e6:.2f}", *losses, f"{run['rate']:g}"])
    head = ["what changes", "method", "MB an epoch", "at Adam's rate", "lowest loss", f"after {EPOCHS} epochs", "rate"]
    return table(head, found)


WORKERS = (5, 10, 50)
METHODS = {
    "Adam, float32": PUBLISHED["Adam, float32"], "ZipML, 16 bits": PUBLISHED["ZipML, 16 bits"],
    "QSGD, 8 bits": PUBLISHED["QSGD, 8 bits"], "TernGrad": PUBLISHED["TernGrad"], "DGC, 10%": PUBLISHED["DGC, 10%"],
    "SKCompress": SKCOMPRESS, "ours: `sparse_small`": "sparse_small",
}  # fmt: skip


def figure_14(tiny: bool) -> Runs:
    """MB of an epoch, up and down, by the number of workers."""
    out: Runs = {"workers": [2, 3] if tiny else list(WORKERS), "methods": {name: [] for name in METHODS}}
    for workers in out["workers"]:
        data = linear_figures.Data.made(10_000 if tiny else SCALE, workers)
        for name, settings in METHODS.items():
            last = linear_figures.train(data, settings, "lr", 1, 1.0)[-1]
            out["methods"][name].append({"up": last.up, "down": last.down, "network": last.network})
    return out


def draw_14(data: Runs) -> Picture:
    figure, panels = picture(2, height=4.2, sharey=True)
    for axes, key, label in zip(panels, ("up", "down"), ("to the driver", "from the driver, to all"), strict=True):
        methods = data["methods"].items()
        curves(axes, ((name, data["workers"], [row[key] / 1e6 for row in rows]) for name, rows in methods))
        axes.set(xscale="log", yscale="log", xlabel="workers", title=label)
        axes.set_xticks(data["workers"], [str(count) for count in data["workers"]])
        axes.minorticks_off()
    panels[0].set_ylabel("MB an epoch, all workers (log)")
    legend_below(figure, panels[0], 4)
    return figure


def table_14(data: Runs) -> str:
    head = ["MB an epoch, up + down (s on 1 Gbit/s)", *(f"{count} workers" for count in data["workers"])]
    found = [
        [name, *(f"{row['up'] / 1e6:.2f} + {row['down'] / 1e6:.2f} ({row['network']:.2f})" for row in rows)]
        for name, rows in data["methods"].items()
    ]
    return table(head, found)


# --- Figure 13: beside one node with scikit-learn

EPOCHS_13, NODES_13 = 20, (5, 10)
SKLEARN: dict[str, tuple[Any, dict[str, Any]]] = {
    "lr": (SGDClassifier, {"loss": "log_loss", "learning_rate": "optimal"}),
    "svm": (SGDClassifier, {"loss": "hinge", "learning_rate": "optimal"}),
    "linear": (SGDRegressor, {"loss": "squared_error", "learning_rate": "invscaling", "eta0": 1.0}),
}
"""Of the schedules of scikit-learn and step sizes of 0.1, 1 and 10, those of the lowest loss; all with ALPHA."""
ALPHA = 1e-5
"""Of 1e-4, 1e-5 and 1e-6, that of the lowest loss of logistic regression and SVM."""


def sklearn_alone(data: linear_figures.Data, model: str, epochs: int) -> Runs:
    """scikit-learn's SGD, a row at a time: the test loss and the processor's seconds after each epoch."""
    kind, options = SKLEARN[model]
    learner = kind(alpha=ALPHA, fit_intercept=False, random_state=0, **options)
    known = {"classes": [-1, 1]} if model != "linear" else {}
    seconds, out = 0.0, Runs(loss=[], seconds=[])
    for _ in range(epochs):
        began = time.process_time()
        learner.partial_fit(data.rows.features, data.rows.labels, **known)
        seconds += time.process_time() - began
        scores = data.test.features @ learner.coef_.ravel()[data.test.support].astype(np.float32)
        out["loss"].append(float(LOSSES[model].value(scores, data.test.labels).mean()))
        out["seconds"].append(seconds)
    return out


def ours_alone(data: linear_figures.Data, model: str, epochs: int) -> Runs:
    """Our job on one node, with nothing to exchange: as ``sklearn_alone``, in batches, by Adam."""
    weights, loss = Model(data.numel, "adam", linear_figures.RATES[model], 0.01), LOSSES[model]
    (batches,) = data.ranks
    seconds, out = 0.0, Runs(loss=[], seconds=[])
    for epoch in range(epochs):
        began = time.process_time()
        for number in linear_data.epoch_order(len(batches), 0, epoch):
            weights.step(weights.gradient(batches[number], loss))
        seconds += time.process_time() - began
        out["loss"].append(weights.losses(data.test, loss) / data.test.labels.size)
        out["seconds"].append(seconds)
    return out


def figure_13(tiny: bool) -> Runs:
    """Loss and seconds after each epoch, on one node and on several."""
    scale, epochs, nodes = (10_000, 2, (2,)) if tiny else (SCALE, EPOCHS_13, NODES_13)
    alone = linear_figures.Data.made(scale, 1)
    out: Runs = {
        model: {
            "scikit-learn, one node": sklearn_alone(alone, model, epochs),
            "ours, one node": ours_alone(alone, model, epochs),
        }
        for model in LOSSES
    }
    for count in nodes:
        data = linear_figures.Data.made(scale, count)
        for model in LOSSES:
            rows = linear_figures.train(data, SKCOMPRESS, model, epochs, 1.0)
            out[model][f"SKCompress, {count} nodes"] = {
                "loss": [row.loss for row in rows], "seconds": [row.seconds for row in rows],
                "network": rows[-1].network,
            }  # fmt: skip
    return out


def draw_13(data: Runs) -> Picture:
    figure, panels = picture(3, height=4.2)
    for axes, (model, runs) in zip(panels, data.items(), strict=True):
        curves(axes, ((name, run["seconds"], run["loss"]) for name, run in runs.items()), ms=4)
        axes.set(xscale="log", xlabel="seconds: processor + modelled network", title=linear_figures.NAMES[model])
    panels[0].set_ylabel("test loss")
    legend_below(figure, panels[0], 4)
    return figure


def table_13(data: Runs) -> str:
    found = []
    for model, runs in data.items():
        for name, run in runs.items():
            alone, whole = runs["scikit-learn, one node"]["seconds"][-1], run["seconds"][-1]
            network = run.get("network", 0.0)
            found.append([
                f"{linear_figures.NAMES[model]}, {name}", f"{whole - network:.2f} + {network:.2f}",
                f"{whole / alone:.2f}", f"{min(run['loss']):.4f}", f"{run['loss'][-1]:.4f}",
            ])  # fmt: skip
    epochs = len(data["lr"]["ours, one node"]["loss"])
    head = ["job", f"s of {epochs} epochs, processor + network", "scikit-learn = 1", "lowest loss", "last loss"]
    return table(head, found)


FIGURES = [
    Figure(
        "skcompress_13", "Sparse linear models: beside scikit-learn on one node", ("SKCompress Figure 13",), figure_13,
        draw_13, table_13, 2, True,
    ),
    Figure(
        "skcompress_14", "Sparse linear models: bytes by the number of workers",
        ("SKCompress Figure 14", "SKCompress Table 5"), figure_14, draw_14, table_14, 2,
    ),
    Figure(
        "skcompress_15", "Sparse linear models: sensitivity, precision, optimizer",
        ("SKCompress Figures 15, 17 and 18", "SKCompress Tables 6 and 7"), figure_15, draw_15, table_15, 4,
    ),
]  # fmt: skip
