"""Trains a sparse linear model on every rank of a Horovod job. A gradient stays sparse from the data to the wire.

    mpirun -np 2 python scripts/train/train_linear.py --config skcompress_nonzero --model lr
    mpirun -np 2 python scripts/train/train_linear.py --data kdda.svm --features 20216830 --optimizer adam --servers 1

The models, optimizers and defaults are those of SKCompress (VLDB Journal 2020, section 7.1): batches of 10% of the
training rows, of which each rank computes its share, l2 regularisation, Adam. Each rank reads its own part of DATA, a
LibSVM file such as KDD10 or KDD12, or generates rows with the statistics of KDD10. After each epoch, rank 0 writes
OUT/metrics.json, every rank saves a checkpoint, and all ranks check that their models are equal to the bit.
``--resume`` continues from the checkpoints.
"""

import json
import os
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import horovod.torch as hvd
import linear_data
import numpy as np
import torch
import typer
from history import same_on_all_ranks
from linear_exchange import Endpoint
from linear_models import LOSSES, Model

from hvd_deepreduce import Config, SparseTensor
from hvd_deepreduce.exchange import traffic


class Exchange:
    """Horovod's operations for ``Endpoint``; the bytes and the seconds of encoding and decoding that they cost this
    rank."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint, self.sent, self.received, self.codec_seconds = endpoint, 0, 0, 0.0

    def mean(self, gradient: SparseTensor) -> SparseTensor:
        """The mean of all ranks' gradients."""
        endpoint, ranks, begin = self.endpoint, hvd.size(), time.perf_counter()
        containers = endpoint.containers(gradient)
        self.codec_seconds += time.perf_counter() - begin
        own = containers[0]
        if endpoint.servers:
            sizes = [one.size for one in containers]
            splits = torch.tensor(sizes + [0] * (ranks - len(sizes)), dtype=torch.int32)
            came, _ = hvd.alltoall(torch.from_numpy(np.concatenate(containers)), splits, name="to_servers")
            mine = sizes[endpoint.rank] if endpoint.rank < len(sizes) else 0
            self._count(traffic.Traffic(sum(sizes) - mine, came.numel() - mine))
            begin = time.perf_counter()
            serves = endpoint.rank < endpoint.servers
            own = endpoint.serve(came.numpy()) if serves else np.empty(0, np.uint8)
            self.codec_seconds += time.perf_counter() - begin
        joined = hvd.allgather(torch.from_numpy(own), name="containers").numpy()
        self._count(traffic.allgather(own.size, joined.size, ranks))
        begin = time.perf_counter()
        mean = endpoint.mean(joined)
        self.codec_seconds += time.perf_counter() - begin
        return mean

    def _count(self, on_wire: traffic.Traffic) -> None:
        self.sent, self.received = self.sent + on_wire.sent, self.received + on_wire.received


def total(*numbers: float) -> list[float]:
    """The sums of some numbers over the ranks."""
    return hvd.allreduce(torch.tensor(numbers, dtype=torch.float64), op=hvd.Sum, name="numbers").tolist()


def save(path: Path, model: Model, endpoint: Endpoint, history: list[dict[str, Any]]) -> None:
    """Writes this rank's checkpoint, atomically and on all ranks at about the same time."""
    residuals = {f"residual{n}": one for n, one in enumerate(endpoint.residuals) if one is not None}
    with path.with_suffix(".part").open("wb") as file:
        np.savez(file, history=json.dumps(history), exchanges=endpoint.step, **residuals, **model.state_dict())
    hvd.barrier()
    os.replace(path.with_suffix(".part"), path)


def load(path: Path, model: Model, endpoint: Endpoint) -> list[dict[str, Any]]:
    """Continues from a checkpoint; returns the epochs so far."""
    if not path.exists():
        raise SystemExit(f"there is no checkpoint {path.name} in {path.parent}: run once without --resume first")
    with np.load(path) as saved:
        model.load_state_dict(saved)
        endpoint.step = int(saved["exchanges"])
        endpoint.residuals = [
            None if one is None else saved[f"residual{n}"] for n, one in enumerate(endpoint.residuals)
        ]
        history: list[dict[str, Any]] = json.loads(str(saved["history"]))
    if len(set(hvd.allgather(torch.tensor([len(history)]), name="epochs").tolist())) > 1:
        raise SystemExit(f"the checkpoints in {path.parent} are of different epochs: start again without --resume")
    return history


def read(data: Path | None, features: int | None, scale: float, zero_based: bool, seed: int) -> linear_data.Rows:
    """This rank's rows."""
    rank, ranks = hvd.rank(), hvd.size()
    if data is None:
        count, numel = linear_data.scaled_kdd10(scale)
        own = count * (rank + 1) // ranks - count * rank // ranks
        return linear_data.generated(own, features or numel, seed, count * rank // ranks)
    rows = linear_data.read_libsvm(data, rank, ranks, zero_based)
    most = int(hvd.allreduce(torch.tensor(rows.features.shape[1]), op=hvd.Max, name="features"))
    if features is not None and features < most:
        raise SystemExit(f"--features is {features}, and {data} has {most}")
    return linear_data.resized(rows, features or most)


def main(
    config: Annotated[str, typer.Option(help="a preset or a YAML file, of one tensor")] = "sparse_best",
    model: Annotated[Literal["lr", "svm", "linear"], typer.Option(help="logistic regression, ...")] = "lr",
    optimizer: Annotated[Literal["sgd", "adam", "amsgrad"], typer.Option()] = "adam",
    lr: Annotated[float, typer.Option(help="learning rate")] = 0.01,
    l2: Annotated[float, typer.Option(help="lambda of the l2 regularisation")] = 0.01,
    epochs: Annotated[int, typer.Option(min=1)] = 10,
    batch: Annotated[float, typer.Option(min=1e-6, max=1.0, help="share of the training rows in a batch")] = 0.1,
    servers: Annotated[int, typer.Option(min=0, help="ranks that decode, add up and encode again; 0: allgather")] = 0,
    data: Annotated[Path | None, typer.Option(help="a LibSVM file; default: generated rows")] = None,
    features: Annotated[int | None, typer.Option(min=1, help="of the model; default: those of the data")] = None,
    zero_based: Annotated[bool, typer.Option("--zero-based", help="the file's indices begin at 0")] = False,
    scale: Annotated[float, typer.Option(help="KDD10's rows and features, divided by this, are generated")] = 100.0,
    bandwidth: Annotated[float, typer.Option(help="Gbit/s of a rank's link, for the modelled time")] = 1.0,
    seed: int = 0,
    out: Annotated[Path, typer.Option(help="folder for metrics and checkpoints")] = Path("runs/train_linear"),
    resume: Annotated[bool, typer.Option("--resume", help="continue from the checkpoints in OUT")] = False,
    stop_after: Annotated[int | None, typer.Option(help="stop after this epoch, as if interrupted")] = None,
) -> None:
    """Trains, and writes OUT/metrics.json and the checkpoints."""
    hvd.init()
    if servers > hvd.size():
        raise SystemExit(f"--servers is {servers}, and the job has {hvd.size()} ranks: use at most one for each")
    settings = Config.load(config, seed=seed)
    if settings.exchange.name != "allgather" or settings.overrides:
        raise SystemExit(
            f"{config} sets an exchange or overrides: a linear model has one tensor, and --servers is its exchange. "
            "Leave them out"
        )
    train, test = read(data, features, scale, zero_based, seed).split(seed)
    loss, tested = LOSSES[model], linear_data.Batch.of(test)
    numel = train.features.shape[1]
    batches = linear_data.batches(train, batch)
    del train, test
    weights = Model(numel, optimizer, lr, l2)
    exchange = Exchange(Endpoint(settings, hvd.rank(), hvd.size(), numel, servers))
    out.mkdir(parents=True, exist_ok=True)
    mine = out / f"checkpoint.rank{hvd.rank()}.npz"
    history = load(mine, weights, exchange.endpoint) if resume else []
    for epoch in range(len(history), epochs):
        exchange.sent, exchange.received, exchange.codec_seconds = 0, 0, 0.0
        train_loss, gradient_seconds, elements, begin = 0.0, 0.0, 0, time.perf_counter()
        for number in linear_data.epoch_order(len(batches), seed, epoch):
            chosen, began = batches[number], time.perf_counter()
            train_loss += weights.losses(chosen, loss) / chosen.labels.size / len(batches)
            gradient = weights.gradient(chosen, loss)
            gradient_seconds += time.perf_counter() - began
            elements += gradient.indices.size
            weights.step(exchange.mean(gradient))
        seconds = time.perf_counter() - begin
        state = (np.ascontiguousarray(one) for one in weights.state_dict().values())
        same_on_all_ranks(state, lambda digest: hvd.allgather(torch.from_numpy(digest)[None], name="model"))
        sent, received, codec_seconds, gradients, trained, of_test, rows = total(
            exchange.sent, exchange.received, exchange.codec_seconds, gradient_seconds, train_loss,
            weights.losses(tested, loss), tested.labels.size,
        )  # fmt: skip
        # The busiest rank's link, which is a server's if there are servers, is the one that all wait for.
        busiest = int(hvd.allreduce(torch.tensor(max(exchange.sent, exchange.received)), op=hvd.Max, name="busiest"))
        history.append({
            "epoch": epoch + 1, "loss": trained / hvd.size(), "test_loss": of_test / rows, "bytes_sent": int(sent),
            "bytes_received": int(received), "density": elements / len(batches) / numel,
            "gradient_seconds": gradients / hvd.size(), "codec_seconds": codec_seconds / hvd.size(), "seconds": seconds,
            "modelled_seconds": (gradients + codec_seconds) / hvd.size() + 8e-9 * busiest / bandwidth,
        })  # fmt: skip
        save(mine, weights, exchange.endpoint, history)
        if hvd.rank() == 0:
            row = history[-1]
            about = {"config": settings.to_dict(), "model": model, "optimizer": optimizer, "lr": lr,
                     "l2": l2, "ranks": hvd.size(), "servers": servers, "features": numel, "batches": len(batches),
                     "bandwidth": bandwidth, "seed": seed}  # fmt: skip
            (out / "metrics.json").write_text(json.dumps({**about, "epochs_done": history}, indent=1))
            print(
                f"{Path(config).stem}: epoch {epoch + 1:2}/{epochs}  loss {row['loss']:.4f}  "
                f"test {row['test_loss']:.4f}  sent {row['bytes_sent'] / 1e6:.2f} MB by all ranks  "
                f"{row['modelled_seconds']:.2f} s at {bandwidth:g} Gbit/s",
                flush=True,
            )
        if stop_after == epoch + 1:
            break
    hvd.shutdown()


if __name__ == "__main__":
    typer.run(main)
