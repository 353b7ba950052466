"""Sparse linear models: loss against bytes and modelled time for the methods of SKCompress and for ours.

    python scripts/papers/linear_figures.py methods --write      # their Figures 11 and 12 and Table 4
    python scripts/papers/linear_figures.py ablation --write     # their Figure 10
    python scripts/papers/linear_figures.py ends --write         # the loss that SKCompress ends at
    python scripts/papers/linear_figures.py codecs --write       # one gradient of 29 M features, 1% nonzero

All ranks are in one process. Each makes real containers of its own gradient; the driver, which is a node of its own as
in SKCompress (section 7.1), decodes, adds up and encodes again. Bytes are counted, the processor's times are measured
on one core, and times of the network are modelled: the driver's link passes all containers, one after the other.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("dev", "train"))

import doc_sections
import figure_kit
import linear_data
import numpy as np
import typer
from linear_data import Batch, Rows
from linear_exchange import DTYPE, Endpoint, exchange_all
from linear_models import LOSSES, Model

from hvd_deepreduce import Config, SparseTensor
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.joint.skcompress import SKCompress
from hvd_deepreduce.codecs.joint.sketchml import SketchML
from hvd_deepreduce.codecs.value.quantile import Quantile
from hvd_deepreduce.ops import delta, flagged_keys, sketch
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.wire import frame

PAGE = figure_kit.RESULTS / "linear.md"
app = typer.Typer(add_completion=False)

ALL: dict[str, Any] = {"sparsifier": "nonzero", "error_feedback": False}
RAW_KEYS = {**ALL, "index": "raw"}
SKETCH = {"buckets": 128, "center": "middle"}
SKCOMPRESS = {**ALL, "joint": {"name": "skcompress", **SKETCH}}
BASE = "SKCompress"


def ours(bits: int, **more: Any) -> dict[str, Any]:
    """Our codecs, both with rANS."""
    value = {"name": "qsgd", "bits": bits, "bucket_size": 512, "norm": "max", "entropy": "rans"}
    return {"index": "rans", "value": value, **more}


def top(density: float) -> dict[str, Any]:
    """A share of the nonzeros, with lazy error feedback."""
    return {"name": "topk", "density": density, "density_of": "nonzeros"}


PUBLISHED: dict[str, dict[str, Any]] = {
    "Adam, float32": {**RAW_KEYS, "value": "raw"},
    "ZipML, 16 bits": {**RAW_KEYS, "value": {"name": "uniform", "bits": 16, "bucket_size": 2**31}},
    "QSGD, 8 bits": {**RAW_KEYS, "value": {"name": "qsgd", "bits": 8, "bucket_size": 2**31, "norm": "l2"}},
    "TernGrad": {**RAW_KEYS, "value": {"name": "ternary", "bucket_size": 2**31}},
    "DGC, 10%": {"sparsifier": top(0.1), "index": "raw", "value": "raw"},
    "SketchML": {**ALL, "joint": {"name": "sketchml", **SKETCH}},
    BASE: SKCOMPRESS,
}
OURS: dict[str, str | dict[str, Any]] = {
    "ours, all nonzeros": ours(4, **ALL),
    "ours, 30%, 8 bits": "sparse_small",
    "ours, 20%, 6 bits": ours(6, sparsifier=top(0.2)),
    "ours, 10%, 6 bits": ours(6, sparsifier=top(0.1)),
}
"""Top-k with lazy error feedback, but for the first."""
COMPONENTS: dict[str, str | dict[str, Any]] = {
    "Adam, float32": PUBLISHED["Adam, float32"],
    "+ keys: `delta`": {**ALL, "index": "delta", "value": "raw"},
    "+ quantile buckets": {**ALL, "index": "delta", "value": {"name": "quantile", "buckets": 128, "center": "middle"}},
    "+ MinMaxSketch (SketchML)": PUBLISHED["SketchML"],
    "+ Huffman, adaptive prefix (SKCompress)": SKCOMPRESS,
    "ours: `rans` keys, float32": {**ALL, "index": "rans", "value": "raw"},
    "+ 4-bit values, rANS": OURS["ours, all nonzeros"],
    "top 30%, lazy feedback, 8 bits": OURS["ours, 30%, 8 bits"],
    "top 10%, lazy feedback, 6 bits": OURS["ours, 10%, 6 bits"],
}
RATES = {"lr": 0.1, "svm": 0.2, "linear": 0.05}
"""Of 0.02, 0.03, 0.05, 0.1, 0.2 and 0.3, those of Adam's lowest loss in 8 epochs; used for all methods, as in the
paper."""
NAMES = {"lr": "logistic regression", "svm": "SVM", "linear": "linear regression"}


class Data(NamedTuple):
    """What all runs share: the features, all training rows, the batches of each rank, and the rows to test on."""

    numel: int
    rows: Rows
    ranks: list[list[Batch]]
    test: Batch

    @classmethod
    def made(cls, scale: float, ranks: int) -> Data:
        count, numel = linear_data.scaled_kdd10(scale)
        train, test = linear_data.generated(count, numel, 0).split(0)
        cuts = [train.labels.size * rank // ranks for rank in range(ranks + 1)]
        own = [train[np.arange(begin, end)] for begin, end in zip(cuts, cuts[1:], strict=False)]
        return cls(numel, train, [linear_data.batches(rows, 0.1) for rows in own], Batch.of(test))

    def density(self) -> float:
        """Mean share of the features that a rank's gradient has."""
        return statistics.mean(one.support.size for batches in self.ranks for one in batches) / self.numel


class Row(NamedTuple):
    """A training after an epoch: the test loss, and the bytes and seconds since the beginning."""

    loss: float
    up: int
    down: int
    computing: float
    network: float

    @property
    def sent(self) -> int:
        return self.up + self.down

    @property
    def seconds(self) -> float:
        return self.computing + self.network

    def an_epoch(self, count: int) -> tuple[str, str]:
        """Cells of a table, of a training of so many epochs: MB up and down, and seconds, of one."""
        up, down, computing, network = (one / count for one in (self.up, self.down, self.computing, self.network))
        return f"{up / 1e6:.3f} / {down / 1e6:.3f}", f"{computing:.2f} + {network:.2f}"


class Coupled(Model):
    """l2 as in the paper's table 2: a part of the gradient, at its features, which passes through Adam."""

    def __init__(self, numel: int, optimizer: str, lr: float, l2: float) -> None:
        super().__init__(numel, optimizer, lr, 0.0)
        self.coupled = np.float32(l2)

    def step(self, gradient: SparseTensor) -> None:
        at = gradient.indices
        super().step(SparseTensor(gradient.numel, at, gradient.values + self.coupled * self.theta[at]))


def train(
    data: Data, settings: str | Mapping[str, Any], model: str, epochs: int, gbit: float, optimizer: str = "adam",
    rate: float | None = None, kind: type[Model] = Model,
) -> list[Row]:  # fmt: skip
    """One training; a row for each epoch. Seconds of computing are the processor's, so that other jobs do not count."""
    ranks, loss, config = len(data.ranks), LOSSES[model], Config.load(settings)
    endpoints = [Endpoint(config, rank, ranks, data.numel, 1) for rank in range(ranks)]
    weights = kind(data.numel, optimizer, rate or RATES[model], 0.01)
    rows, up, down, computing = [], 0, 0, 0.0
    for epoch in range(epochs):
        for number in linear_data.epoch_order(len(data.ranks[0]), 0, epoch):
            begin = time.process_time()
            gradients = [weights.gradient(batches[number], loss) for batches in data.ranks]
            computing += (time.process_time() - begin) / ranks  # the ranks do it at the same time
            exchanged = exchange_all(endpoints, gradients)
            begin = time.process_time()
            weights.step(exchanged.mean)
            computing += time.process_time() - begin + exchanged.seconds
            up, down = up + exchanged.up, down + exchanged.down
        tested = weights.losses(data.test, loss) / data.test.labels.size
        rows.append(Row(tested, up, down, computing, 8e-9 * (up + down) / gbit))
    return rows


def first_below(rows: list[Row], loss: float) -> int | None:
    """The first epoch, from 0, with at most this loss."""
    return next((epoch for epoch, row in enumerate(rows) if row.loss <= loss), None)


def table(runs: Mapping[str, list[Row]], epochs: int) -> str:
    """Loss, bytes, and what it takes to reach the loss of SKCompress."""
    target = min(row.loss for row in runs[BASE][:epochs])
    base = runs[BASE][first_below(runs[BASE], target) or 0]
    head = [
        "method", "lowest loss", "MB an epoch, up / down", "s an epoch, computing + network",
        f"to the loss {target:.4f}: epochs", "MB", "s", "bytes / those of SKCompress",
    ]  # fmt: skip
    lines = []
    for name, rows in runs.items():
        reached, there = first_below(rows, target), [f"not in {len(rows)} | | |"]
        if reached is not None:
            row = rows[reached]
            there = [f"{reached + 1}", f"{row.sent / 1e6:.2f}", f"{row.seconds:.2f}", f"{row.sent / base.sent:.3f}"]
        lines.append([name, f"{min(row.loss for row in rows):.4f}", *rows[-1].an_epoch(len(rows)), *there])
    return doc_sections.table(head, lines)


def picture(all_runs: Mapping[str, Mapping[str, list[Row]]], path: Path) -> None:
    """Loss against bytes, and against modelled time."""
    figure, axes = figure_kit.picture(len(all_runs), 2, 4.4 * len(all_runs), 7, squeeze=False)
    for column, (model, runs) in enumerate(all_runs.items()):
        for name, rows in runs.items():
            style = "-" if name in OURS else "--"
            for axis, x in ((axes[0][column], [row.sent / 1e6 for row in rows]),
                            (axes[1][column], [row.seconds for row in rows])):  # fmt: skip
                axis.plot(x, [row.loss for row in rows], style, label=name, linewidth=1.3)
        axes[0][column].set(title=NAMES[model], xscale="log", xlabel="MB sent by all", ylabel="test loss")
        axes[1][column].set(xscale="log", xlabel="modelled seconds", ylabel="test loss")
        top_loss = max(rows[0].loss for name, rows in runs.items() if name != "TernGrad")
        for axis in (axes[0][column], axes[1][column]):
            axis.set_ylim(top=top_loss)
    figure_kit.legend_below(figure, axes[0][0], 6)
    figure_kit.save(figure, path)


Write = Annotated[bool, typer.Option("--write", help="write the section of docs/results/linear.md")]
Scale = Annotated[float, typer.Option(help="rows and features of KDD10, divided by this")]
Epochs = Annotated[int, typer.Option(min=1, help="of the published methods; ours have twice as many")]
Gbit = Annotated[float, typer.Option(help="of the driver's link")]
Ranks = Annotated[int, typer.Option(min=1, help="as in the paper's first cluster")]


def about(data: Data, scale: float, gbit: float) -> str:
    rows = sum(one.labels.size for batches in data.ranks for one in batches)
    return (
        f"Generated rows (`linear_data.generated`) with the statistics of KDD10 divided by {scale:g}: {data.numel:,} "
        f"features, {rows:,} training rows of 29 features. {len(data.ranks)} executors and a driver on links of "
        f"{gbit:g} Gbit/s, batches of 10%; a rank's gradient has {data.density():.2%} of the features. Adam, l2 = "
        "0.01, one seed. A loss is the mean of the test rows, without the l2 term. MB are those of all ranks. Seconds "
        "of computing are the processor's; bytes and losses repeat exactly."
    )


@app.command()
def methods(
    scale: Scale = 100, ranks: Ranks = 10, epochs: Epochs = 12, gbit: Gbit = 1.0,
    model: Annotated[list[str] | None, typer.Option(help="lr, svm or linear; default: all")] = None,
    write: Write = False,
) -> None:  # fmt: skip
    """Loss against bytes and modelled time, for all methods."""
    data = Data.made(scale, ranks)
    all_runs: dict[str, dict[str, list[Row]]] = {}
    body = [about(data, scale, gbit)]
    for one in model or list(LOSSES):
        runs = all_runs[one] = {}
        for name, settings in {**PUBLISHED, **OURS}.items():
            runs[name] = train(data, settings, one, 2 * epochs if name in OURS else epochs, gbit)
            print(
                one, name, " ".join(f"{row.loss:.4f}" for row in runs[name]), f"{runs[name][-1].sent:,} B", flush=True
            )
        body.append(
            f"### {NAMES[one][0].upper()}{NAMES[one][1:]}, learning rate {RATES[one]:g}\n\n{table(runs, epochs)}"
        )
        print(body[-1], flush=True)
    if write:
        picture(all_runs, figure_kit.FOLDER / "linear.png")
        body.insert(1, "![test loss against bytes and modelled seconds](figures/linear.png)")
        doc_sections.write(PAGE, "methods", "Loss against bytes and modelled time", "\n\n".join(body))


@app.command()
def ablation(
    scale: Scale = 100, ranks: Ranks = 10, epochs: Annotated[int, typer.Option(min=1)] = 3, gbit: Gbit = 1.0,
    write: Write = False,
) -> None:  # fmt: skip
    """Bytes and time an epoch as components are added, for logistic regression."""
    data = Data.made(scale, ranks)
    elements = sum(one.support.size for batches in data.ranks for one in batches)
    head = [
        "components", "bits a nonzero, up", "MB an epoch, up / down", "s an epoch, computing + network",
        f"loss after {epochs} epochs",
    ]  # fmt: skip
    lines = []
    for name, settings in COMPONENTS.items():
        last = train(data, settings, "lr", epochs, gbit)[-1]
        bits = f"{8 * last.up / epochs / elements:.2f}"
        lines.append([name, bits, *last.an_epoch(epochs), f"{last.loss:.4f}"])
        print(doc_sections.row(lines[-1]), flush=True)
    if write:
        body = [f"{about(data, scale, gbit)} Logistic regression.", doc_sections.table(head, lines), *equal_keys(data)]
        doc_sections.write(PAGE, "ablation", "Components", "\n\n".join(body))


def equal_keys(data: Data) -> Iterator[str]:
    """The bits of a nonzero as each component takes them, with either code of keys, of gradients after one epoch; and
    how many times fewer SKCompress takes than the paper's pairs, of a whole batch."""
    weights, loss, key = Model(data.numel, "adam", RATES["lr"], 0.01), LOSSES["lr"], RngKey(0, 0, 0)
    ends = [Endpoint(Config.load(PUBLISHED["Adam, float32"]), rank, len(data.ranks), data.numel, 1)
            for rank in range(len(data.ranks))]  # fmt: skip
    for number in range(len(data.ranks[0])):
        whole = exchange_all(ends, [weights.gradient(batches[number], loss) for batches in data.ranks]).mean
        weights.step(whole)
    count, sums = 0, dict.fromkeys(("plain", "adaptive", "numbers", "sketch", "both", "coded"), 0)
    for one in (weights.gradient(batch, loss) for batches in data.ranks for batch in batches):
        at, values = one.indices, one.values
        plain = SketchML(**SKETCH).encode(at, values, one.numel, key)[0]
        coded = SKCompress(**SKETCH).encode(at, values, one.numel, key)[0]
        sizes = [
            section[sketch.HEADER.size + 4 * header.buckets : header.parts_at].view(np.uint32).reshape(-1, 3).sum(0)
            for section in (plain, coded) for header in [sketch.Header.of(section)]
        ]  # fmt: skip
        count += at.size
        sums["plain"] += flagged_keys.encode(at).size
        sums["adaptive"] += delta.encode(at).size
        sums["numbers"] += Quantile(**SKETCH).encode(values, at, key)[0].size
        sums["sketch"] += plain.size
        sums["both"] += plain.size - int(sizes[0][1]) + int(sizes[1][1])
        sums["coded"] += coded.size

    def bits(*parts: str) -> str:
        return f"{8 * sum(sums[part] for part in parts) / count:.2f}"

    rows = [
        ("buckets' numbers, without a sketch", bits("plain", "numbers"), bits("adaptive", "numbers")),
        ("MinMaxSketch", bits("sketch"), bits("both")),
        ("MinMaxSketch, Huffman", "", bits("coded")),
    ]
    yield "### Equal keys\n\nBits a nonzero, up, with tables and headers of sections, of all gradients after one epoch."
    yield doc_sections.table(["values", "plain keys", "keys with an adaptive prefix"], rows)
    section = SKCompress(**SKETCH).encode(whole.indices, whole.values, whole.numel, key)[0]
    pair = 12
    yield (
        "### The paper's baseline\n\nThe gradient of a whole batch, 10% of the rows: the paper's message of 35.58 MB "
        f"has a tenth of KDD10's features, if a pair has {pair} bytes, with a value of 8."
    )
    yield doc_sections.table(
        ["share of the features", "SKCompress, bytes", f"pairs of {pair} bytes / SKCompress"],
        [(f"{whole.indices.size / whole.numel:.2%}", f"{section.size:,}",
          f"{pair * whole.indices.size / section.size:.2f}")],
    )  # fmt: skip


ENDS: dict[str, str | dict[str, Any]] = {
    "Adam, float32": PUBLISHED["Adam, float32"], "SKCompress: middles": SKCOMPRESS,
    "`skcompress_mean`: means": "skcompress_mean",
    "DGC, 10%, the rest is dropped": {**ALL, "sparsifier": top(0.1), "index": "raw", "value": "raw"},
    "DGC, 10%, with a residual": PUBLISHED["DGC, 10%"], "TernGrad": PUBLISHED["TernGrad"],
}  # fmt: skip
END_RATES = (3.0, 1.0, 0.5, 0.3, 0.2, 0.1, 0.05, 0.03, 0.01, 0.003)
KINDS: dict[str, type[Model]] = {"decoupled": Model, "in the gradient": Coupled}


def at_best_rate(
    name: str, data: Data, settings: str | Mapping[str, Any], epochs: int, optimizer: str = "adam",
    kind: type[Model] = Model,
) -> tuple[float, dict[float, list[Row]]]:  # fmt: skip
    """The one of ``END_RATES`` with the lowest loss of logistic regression, and the trainings with all of them."""
    runs = {rate: train(data, settings, "lr", epochs, 1.0, optimizer, rate, kind) for rate in END_RATES}
    return figure_kit.best_inside(END_RATES, lambda rate: lowest(runs[rate]), name), runs


def lowest(rows: list[Row]) -> float:
    """Loss of a training."""
    return min(row.loss for row in rows)


@app.command()
def ends(scale: Scale = 100, ranks: Ranks = 10, epochs: Epochs = 12, write: Write = False) -> None:
    """The lowest loss of logistic regression, with l2 as weight decay and as a part of the gradient."""
    data, lines = Data.made(scale, ranks), []
    for words, kind in KINDS.items():
        adam = 0.0
        for name, settings in ENDS.items():
            best, runs = at_best_rate(f"{name}, l2 {words}: rate", data, settings, epochs, kind=kind)
            adam = adam or best
            cells = (f"{one:.4f}" for one in (lowest(runs[adam]), lowest(runs[best]), runs[best][-1].loss))
            lines.append([words, name, *cells, f"{best:g}"])
            print(doc_sections.row(lines[-1]), flush=True)
    if write:
        head = ["l2", "method", "at Adam's rate", "lowest loss", f"after {epochs} epochs", "rate"]
        body = (
            f"{about(data, scale, 1.0)} Logistic regression, {epochs} epochs. Each method has its own best learning "
            f"rate of {', '.join(f'{rate:g}' for rate in END_RATES)}; the paper gives all methods Adam's, with which "
            "the third column was found. Its l2 term is a part of the gradient (its table 2); the other sections have "
            "weight decay.\n\n" + doc_sections.table(head, lines)
        )
        doc_sections.write(PAGE, "ends", "Where SKCompress ends", body)


def fastest_ms(action: Callable[[], Any], repeats: int) -> float:
    """Of some runs, after one to warm up."""
    action()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        action()
        times.append(time.perf_counter() - begin)
    return 1e3 * min(times)


@app.command()
def codecs(
    rows_share: Annotated[float, typer.Option(help="of KDD10's rows in the batch")] = 0.0039,
    repeats: Annotated[int, typer.Option(min=1)] = 40,
    write: Write = False,
) -> None:
    """Encoding and decoding one gradient as large as KDD10's, on one thread."""
    rows = linear_data.generated(int(rows_share * linear_data.KDD10[0]), linear_data.KDD10[1], 0)
    gradient = Model(rows.features.shape[1], "adam", 0.1, 0.0).gradient(Batch.of(rows), LOSSES["lr"])
    key, count, numel = RngKey(0, 0, 0), gradient.indices.size, gradient.numel
    lines = []
    for name, settings in {**PUBLISHED, **OURS}.items():
        config = Config.load(settings)
        pipeline = Pipeline(config, 1)
        residual = np.zeros(numel, np.float32) if config.error_feedback else None
        container = pipeline.encode_sparse(gradient, residual, key, 2)
        expected = pipeline.expected(numel, DTYPE, key)

        encode = partial(pipeline.encode_sparse, gradient, residual, key, 2)

        def decode(pipeline: Pipeline = pipeline, container: Any = container, expected: Any = expected) -> SparseTensor:
            return pipeline.decode_sparse(frame.split(container, 1, [expected])[0], numel, DTYPE, 1.0, key)

        times = [fastest_ms(action, repeats) for action in (encode, decode)]
        cells = [name, f"{container.size:,}", f"{8 * container.size / count:.2f}", *(f"{ms:.1f}" for ms in times)]
        lines.append(cells)
        print(doc_sections.row(cells), flush=True)
    if write:
        body = (
            f"A gradient of logistic regression on {rows.labels.size:,} generated rows: {count:,} nonzeros of "
            f"{numel:,} features ({count / numel:.2%}). One thread, the fastest of {repeats} runs, a residual of all "
            "features where there is error feedback; nothing else of this size is read or made.\n\n"
            + doc_sections.table(["method", "bytes", "bits a nonzero", "encode, ms", "decode, ms"], lines)
        )
        doc_sections.write(PAGE, "codecs", "One gradient of 29 M features", body)


if __name__ == "__main__":
    app()
