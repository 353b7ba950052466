"""Trains a convolutional network, a transformer and an embedding model with every preset, and compares them with dense.

    mpirun -np 2 python scripts/bench/bench_presets.py                                 # all presets
    mpirun -np 2 python scripts/bench/bench_presets.py --presets smallest,fast   # these, and dense
    mpirun -np 2 python scripts/bench/bench_presets.py --jobs cnn --write              # one job; writes the page
    mpirun -np 2 python scripts/bench/bench_presets.py --presets fast --keep --write   # keeps the page's other rows

One launch runs all jobs, one after another, each from the same initial parameters and with the same data. The figures
of a job are its bytes and its result on data that it has not seen. They depend on no clock.

- cnn: the ResNet of train_torch.py on scikit-learn's digits, SGD with momentum 0.9. Result: test accuracy.
- gpt: a causal transformer that predicts the next character of Python's reference manual (``pydoc_data``), AdamW.
  Result: loss in nats per character.
- embedding: the NeuMF of scripts/train/ncf.py on a generated table, Adam. Result: hit rate at 10.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from pydoc_data import topics
from typing import Annotated, Any

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("dev", "train"))

import doc_sections
import horovod.torch as hvd
import launchers
import ncf
import torch
import typer
from simulated_training import accuracy
from torch import nn
from torch.nn import functional
from train_torch import ResNet, digits

from hvd_deepreduce import Config
from hvd_deepreduce.config import presets
from hvd_deepreduce.exchange import traffic
from hvd_deepreduce.torch import DeepReduce, LocalSGD

DOC = doc_sections.RESULTS / "presets.md"
SPAN = 64
"""Characters that the transformer sees at once."""


@dataclass
class Outcome:
    """What a job sent, as ``stats()`` counts it, in shares of a dense ring, and in bytes of a step and rank on average;
    and what it reached: accuracy, loss or hit rate."""

    sent: float
    step_bytes: float
    result: float


class Gpt(nn.Module):
    """Two layers of width 128, with the normalization before each part: 0.4 million parameters."""

    def __init__(self, symbols: int, width: int = 128) -> None:
        super().__init__()
        self.symbol, self.place = nn.Embedding(symbols, width), nn.Embedding(SPAN, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, symbols)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(SPAN))

    def loss(self, text: torch.Tensor) -> torch.Tensor:
        """The mean over ``text``, int64 ``[batch, SPAN + 1]``."""
        seen, wanted = text[:, :-1], text[:, 1:]
        scores = self.head(self.layers(self.symbol(seen) + self.place.weight, mask=self.mask, is_causal=True))
        return functional.cross_entropy(scores.flatten(0, 1), wanted.flatten())


def mean_over_ranks(value: float) -> float:
    return float(hvd.allreduce(torch.tensor(value, dtype=torch.float64), name="result"))


def outcome(model: nn.Module, compression: DeepReduce | LocalSGD | None, steps: int, result: float) -> Outcome:
    dense = traffic.allreduce(4 * sum(parameter.numel() for parameter in model.parameters()) * steps, hvd.size()).sent
    sent = dense if compression is None else compression.stats()["total"]["bytes_sent"]
    if compression:
        compression.close()
    return Outcome(sent / dense, sent / steps, result)


def trained(
    model: nn.Module, plain: torch.optim.Optimizer, config: str, losses: Iterator[Any], steps: int, **schedule: Any
) -> DeepReduce | LocalSGD | None:
    """Trains by one cycle of the learning rate; returns what has counted the bytes.

    Args:
        losses: functions that compute the loss of each step.
    """
    optimizer, compression = launchers.HorovodJob().distribute_any(model, plain, config)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, plain.defaults["lr"], total_steps=steps, **schedule)
    for loss in losses:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        cycle.step()
    launchers.finish(optimizer)
    return compression


def cnn(config: str, effort: float) -> Outcome:
    images, labels, test_images, test_labels = digits()
    model = ResNet(32)
    momentum = 0.0 if config != "none" and Config.load(config).has_velocity else 0.9  # DGC has the momentum
    epochs, batch = math.ceil(12 * effort), 32
    steps = len(images) // hvd.size() // batch

    def losses() -> Iterator[Any]:
        for epoch in range(epochs):
            order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
            for chosen in order[hvd.rank() :: hvd.size()][: steps * batch].split(batch):
                yield lambda chosen=chosen: functional.cross_entropy(model(images[chosen]), labels[chosen])

    plain = torch.optim.SGD(model.parameters(), 0.05, momentum, weight_decay=5e-4)
    schedule: dict[str, Any] = {"pct_start": 0.2, "cycle_momentum": momentum > 0}
    compression = trained(model, plain, config, losses(), epochs * steps, **schedule)
    result = mean_over_ranks(accuracy(model, test_images, test_labels))
    return outcome(model, compression, epochs * steps, result)


def gpt(config: str, effort: float) -> Outcome:
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    symbols = sorted(set(text))
    numbers = {symbol: number for number, symbol in enumerate(symbols)}
    data = torch.tensor([numbers[symbol] for symbol in text])
    cut, model = len(data) * 9 // 10, Gpt(len(symbols))
    steps, batch = math.ceil(400 * effort), 16
    lr = 2e-3 * hvd.size() ** 0.5 if config.startswith("adamw_") else 2e-3  # as these presets ask for

    def losses(begin: int, end: int, count: int, seed: int) -> Iterator[Any]:
        random = torch.Generator().manual_seed(seed)
        for _ in range(count):
            starts = torch.randint(begin, end - SPAN - 1, (batch,), generator=random)
            part = torch.stack([data[start : start + SPAN + 1] for start in starts.tolist()])
            yield lambda part=part: model.loss(part)

    plain = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.01)
    compression = trained(model, plain, config, losses(0, cut, steps, 1 + hvd.rank()), steps, pct_start=0.1)
    with torch.no_grad():
        found = [float(loss()) for loss in losses(cut, len(data), 32, 0)]
    return outcome(model, compression, steps, mean_over_ranks(sum(found) / len(found)))


def embedding(config: str, effort: float) -> Outcome:
    ratings = ncf.Ratings.generated(600, 400, 0)
    job = ncf.InTorch(ratings, 16, 0.004, 0, config)
    steps = 0
    for epoch in range(math.ceil(4 * effort)):
        for batch in ratings.batches(600, hvd.rank(), hvd.size(), (0, epoch)):
            job.step(*batch)
            steps += 1
    launchers.finish(job.optimizer)
    return outcome(job.model, job.compression, steps, ncf.hit_rate(job, ratings, hvd.rank(), hvd.size()))


JOBS: dict[str, Callable[[str, float], Outcome]] = {"cnn": cnn, "gpt": gpt, "embedding": embedding}


def shown(task: str, one: Outcome, dense: Outcome) -> list[str]:
    """Two cells of the table: the share that was sent, and the loss of quality: positive is worse than dense."""
    lost = one.result - dense.result if task == "gpt" else 100 * (dense.result - one.result)
    text = "diverged" if not math.isfinite(lost) else f"{lost:+.2f}"
    return [f"{100 * one.sent:.3g}%", text]


def kept_rows(section: str) -> dict[str, list[str]]:
    """The cells of the presets that a section of the page shows."""
    return {name: cells for table in doc_sections.tables(section) for name, *cells in table["rows"]}


def table(found: dict[str, dict[str, Outcome]], kept: dict[str, list[str]]) -> str:
    """In Markdown: a row for each preset, of this run or ``kept`` from others; the best bytes come first."""
    dense = found["none"]
    heads = {"cnn": "points of accuracy", "gpt": "nats", "embedding": "points of hit rate"}
    made = {name: [cell for task in dense for cell in shown(task, one[task], dense[task])]
            for name, one in found.items() if name != "none"}  # fmt: skip
    rows = sorted({**kept, **made}.items(), key=lambda row: sum(float(cell.rstrip("%")) for cell in row[1][::2]))
    head = ["preset", *(cell for task in dense for cell in (f"{task}: sent", f"{heads[task]} lost"))]
    return doc_sections.table(head, ([name, *cells] for name, cells in rows), right=True)


def page(section: str, found: dict[str, dict[str, Outcome]], kept: dict[str, list[str]]) -> str:
    """The section's body, which says on the page what the columns are and why some presets lose much."""
    dense = found["none"]
    reached = {
        "cnn": "{:.2%} accuracy on the digits' test images (a ResNet of width 32, SGD with momentum 0.9)",
        "gpt": "{:.3f} nats per character on text that it has not seen (two layers of width 128, AdamW)",
        "embedding": "{:.2%} hit rate at 10 (NeuMF on a generated table, Adam)",
    }
    dense_rows = "\n".join(
        f"- {task}: {reached[task].format(one.result)}; {one.step_bytes:,.0f} bytes sent by a rank in a step."
        for task, one in dense.items()
    )
    about = (
        f"Written by scripts/bench/bench_presets.py, on {hvd.size()} ranks, on {date.today()}. One seed: "
        "differences of 1 point or of 0.02 nats are noise. The jobs are small and short. They show which "
        "presets go with which kinds of models, and not what your job will lose."
        + ("" if not kept else f" Only {', '.join(found)} ran on that day: the other rows are of earlier runs, each "
           "relative to a dense run of its own, which may have reached something else.")
    )  # fmt: skip
    return doc_sections.refreshed(DOC, section, [about, None, dense_rows, table(found, kept)])


def main(
    chosen: Annotated[str, typer.Option("--presets", help="comma-separated; default: all")] = "",
    tasks: Annotated[str, typer.Option("--jobs", help="comma-separated, of cnn, gpt and embedding")] = ",".join(JOBS),
    effort: Annotated[float, typer.Option(help="factor of the number of epochs or steps")] = 1.0,
    write: Annotated[bool, typer.Option("--write", help="write docs/results/presets.md")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="keep the rows of other presets that the page has")] = False,
    out: Annotated[Path, typer.Option(help="file for all figures")] = Path("runs/presets.json"),
) -> None:
    """Trains every job with dense gradients and with every preset, under a launcher."""
    hvd.init()
    torch.set_num_threads(1)
    wanted = tasks.split(",")
    found: dict[str, dict[str, Outcome]] = {}
    asked = tasks.replace(",", ", ")
    before = doc_sections.read(DOC, asked) if keep else ""
    if keep and (not before or effort != 1):
        raise typer.BadParameter(
            f"--keep takes rows from the section '{asked}' of {DOC.name}, whose runs have --effort 1: give --jobs as "
            "the section has them, and no --effort"
        )
    kept = kept_rows(before)
    for config in ["none", *(chosen.split(",") if chosen else presets.files())]:
        found[config] = {}
        for task in wanted:
            torch.manual_seed(0)
            one = found[config][task] = JOBS[task](config, effort)
            if hvd.rank() == 0:
                print(f"{config} {task}: sent {one.sent:.4%}, {one.step_bytes:,.0f} bytes a step; result "
                      f"{one.result:.4f}", flush=True)  # fmt: skip
                out.parent.mkdir(parents=True, exist_ok=True)
                every = {name: {job: vars(done) for job, done in jobs.items()} for name, jobs in found.items()}
                out.write_text(json.dumps(every))
    if hvd.rank() == 0:
        print(f"\n{table(found, kept)}")
        if write:
            doc_sections.write(DOC, asked, f"Small jobs: {asked}", page(asked, found, kept))
    hvd.shutdown()


if __name__ == "__main__":
    typer.run(main)
