"""Neural collaborative filtering (NCF), the inherently sparse model of the papers, in PyTorch and Keras.

    python scripts/train/ncf.py table --framework tensorflow --data PATH      # all methods: volumes and hit rates
    mpirun -np 2 python scripts/train/ncf.py train --framework torch --config dr_bf_p0_qsgd --data PATH

``table`` repeats table 2 of DeepReduce. PATH is MovieLens as published: the folder of ml-1m (ratings.dat) or ml-20m
(ratings.csv), or one of these files. Without PATH, a table is generated from a latent-factor model with the skew of
ml-1m.

The model is NeuMF (He et al., "Neural collaborative filtering", WWW 2017, sections 3.3 and 4). It has embeddings of
users and items, and computes one score from their product and from a perceptron. Feedback is implicit: pairs that were
rated have the label 1, pairs with a random item have the label 0. The last item of each user is held out. The test
ranks it among 100 items that the user has not rated; the metric is the hit rate at 10. Most rows of the gradient of an
embedding are exactly zero, so no sparsifier is needed (``sparsifier: nonzero``).

A method is a config, ``none`` (dense, stock Horovod), or ``indexed`` (IndexedSlices as stock Horovod sends them, with
TensorFlow only).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from history import mpirun, total
from rich.console import Console
from rich.table import Table

from hvd_deepreduce.exchange import traffic

NEGATIVES, RANKED, TOP = 4, 100, 10
app = typer.Typer(add_completion=False)


@dataclass
class Ratings:
    """Pairs of users and the items that they rated. The last item of each user is held out for the test.

    Attributes:
        users, items: int64 ``[pairs]``, the user and the item of each training pair, numbered from 0.
        test: int64 ``[user_count]``, the last item of each user.
        rated: sorted ``user * item_count + item`` of all pairs, including the test pairs.
        user_count, item_count: the number of users and of items.
    """

    users: np.ndarray
    items: np.ndarray
    test: np.ndarray
    rated: np.ndarray
    user_count: int
    item_count: int

    @classmethod
    def of(cls, users: np.ndarray, items: np.ndarray, times: np.ndarray) -> Ratings:
        """Ratings from columns in any order, with any user and item numbers. Users with one rating are left out."""
        order = np.lexsort((items, times, users))
        users, items = users[order], items[order]
        _, users, counts = np.unique(users, return_inverse=True, return_counts=True)
        enough = counts[users] > 1
        _, users = np.unique(users[enough], return_inverse=True)
        _, items = np.unique(items[enough], return_inverse=True)
        user_count, item_count = int(users.max()) + 1, int(items.max()) + 1
        last = np.append(users[1:] != users[:-1], True)
        rated = np.unique(users * item_count + items)
        return cls(users[~last], items[~last], items[last], rated, user_count, item_count)

    @classmethod
    def read(cls, path: Path) -> Ratings:
        """MovieLens: ``user::item::rating::time`` (ml-1m), or a header and ``user,item,rating,time`` (ml-20m)."""
        if path.is_dir():
            found = [path / name for name in ("ratings.dat", "ratings.csv") if (path / name).exists()]
            if not found:
                raise SystemExit(f"--data: {path} has neither ratings.dat (ml-1m) nor ratings.csv (ml-20m)")
            path = found[0]
        text = path.read_text("utf-8")
        if path.suffix == ".dat":
            rows = np.array([line.split("::") for line in text.split()], np.float64)
        else:
            rows = np.array([line.split(",") for line in text.split()[1:]], np.float64)
        return cls.of(*(rows[:, column].astype(np.int64) for column in (0, 1, 3)))

    @classmethod
    def generated(cls, user_count: int, item_count: int, seed: int) -> Ratings:
        """A table with the skew of ml-1m: each user draws items without replacement, with probabilities proportional to
        exp(taste . kind + popularity). With 6040 users and 3706 items, a user rated 93 items (median) or 163 (mean),
        and at least 20, and an item was rated by 120 users (median) or 267 (mean); in ml-1m it is 96, 165, 20, 123 and
        270. A smaller table is denser, and its items are less skewed."""
        rng = np.random.default_rng(seed)
        counts = np.exp(np.log(96) + 1.04 * rng.standard_normal(user_count))
        counts = np.clip(counts, 20, item_count // 2).astype(np.int64)
        popularity = 2.1 * rng.standard_normal(item_count)
        taste, kind = rng.standard_normal((user_count, 8)), rng.standard_normal((item_count, 8))
        users, items = [], []
        for user in range(user_count):
            # The largest scores after adding Gumbel noise are a sample without replacement (Gumbel top-k).
            score = 0.7 * kind @ taste[user] + popularity + rng.gumbel(size=item_count)
            items.append(rng.permutation(np.argpartition(-score, counts[user])[: counts[user]]))
            users.append(np.full(counts[user], user))
        return cls.of(np.concatenate(users), np.concatenate(items), np.arange(counts.sum()))

    def unrated_items(self, users: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """A random item for each user that this user has not rated."""
        items = rng.integers(0, self.item_count, users.size)
        while True:
            codes = users * self.item_count + items
            at = np.minimum(np.searchsorted(self.rated, codes), self.rated.size - 1)
            again = np.flatnonzero(self.rated[at] == codes)
            if not again.size:
                return items
            items[again] = rng.integers(0, self.item_count, again.size)

    def batches(self, size: int, rank: int, ranks: int, seed: tuple[int, ...]) -> Iterator[tuple[np.ndarray, ...]]:
        """Batches of users, items and labels of one epoch. Ranks have disjoint pairs and equally many batches."""
        order = np.random.default_rng(seed).permutation(self.users.size)
        rng = np.random.default_rng((*seed, rank))
        mine = order[rank : order.size // ranks * ranks : ranks]
        users = np.repeat(self.users[mine], 1 + NEGATIVES)
        items = self.unrated_items(users, rng)
        items[:: 1 + NEGATIVES] = self.items[mine]
        labels = np.zeros(users.size, np.float32)
        labels[:: 1 + NEGATIVES] = 1
        shuffled = rng.permutation(users.size)
        for at in range(0, users.size - size + 1, size):
            chosen = shuffled[at : at + size]
            yield users[chosen], items[chosen], labels[chosen]

    def test_items(self, rank: int, ranks: int) -> tuple[np.ndarray, np.ndarray]:
        """The users of this rank, and items ``[users, 1 + RANKED]``: the held-out item, then unrated ones."""
        users = np.arange(self.user_count)
        others = self.unrated_items(np.repeat(users, RANKED), np.random.default_rng(1)).reshape(-1, RANKED)
        return users[rank::ranks], np.concatenate([self.test[:, None], others], 1)[rank::ranks]


def neumf(ratings: Ratings, factors: int) -> Any:
    """NeuMF as a PyTorch module, from users and items, int64 ``[pairs]``, to scores, float32 ``[pairs]``."""
    import torch

    class NeuMF(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = (ratings.user_count, ratings.item_count)
            self.product = torch.nn.ModuleList(torch.nn.Embedding(size, factors) for size in sizes)
            self.sides = torch.nn.ModuleList(torch.nn.Embedding(size, 2 * factors) for size in sizes)
            for table in (*self.product, *self.sides):
                torch.nn.init.normal_(table.weight, std=0.01)
            widths = (4 * factors, 4 * factors, 2 * factors, factors)
            dense = [torch.nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False)]
            self.tower = torch.nn.Sequential(*(part for layer in dense for part in (layer, torch.nn.ReLU())))
            self.score = torch.nn.Linear(2 * factors, 1)

        def forward(self, users: Any, items: Any) -> Any:
            product = self.product[0](users) * self.product[1](items)
            tower = self.tower(torch.cat([self.sides[0](users), self.sides[1](items)], 1))
            return self.score(torch.cat([product, tower], 1))[:, 0]

    return NeuMF()


class InTorch:
    """NeuMF and its optimizer in PyTorch."""

    def __init__(self, ratings: Ratings, factors: int, lr: float, seed: int, method: str) -> None:
        import torch
        from launchers import HorovodJob

        if method == "indexed":
            raise SystemExit("--config indexed needs --framework tensorflow, because PyTorch has no IndexedSlices")
        job = HorovodJob()
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // job.local_size))
        torch.manual_seed(seed)
        self.hvd, self.torch, self.model = job.hvd, torch, neumf(ratings, factors)
        plain = torch.optim.Adam(self.model.parameters(), lr)
        self.optimizer, self.compression = job.distribute_any(self.model, plain, method, seed)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.dense = traffic.allreduce(4 * self.parameters, job.size).sent
        self.sent = self._counted = 0

    def step(self, users: np.ndarray, items: np.ndarray, labels: np.ndarray) -> float:
        self.optimizer.zero_grad()
        scores = self.model(self.torch.from_numpy(users), self.torch.from_numpy(items))
        loss = self.torch.nn.functional.binary_cross_entropy_with_logits(scores, self.torch.from_numpy(labels))
        loss.backward()
        self.optimizer.step()
        counted = self.compression.stats()["total"]["bytes_sent"] if self.compression else self._counted + self.dense
        self.sent, self._counted = self.sent + counted - self._counted, counted
        return float(loss.item())

    def scores(self, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        with self.torch.no_grad():
            answers: np.ndarray = self.model(self.torch.from_numpy(users), self.torch.from_numpy(items)).numpy()
        return answers

    def mean(self, value: float, name: str) -> float:
        return float(self.hvd.allreduce(self.torch.tensor(value, dtype=self.torch.float64), name=name))


class InTensorFlow:
    """NeuMF and its optimizer in Keras."""

    def __init__(self, ratings: Ratings, factors: int, lr: float, seed: int, method: str) -> None:
        import horovod.tensorflow as hvd
        import tensorflow as tf

        from hvd_deepreduce.tensorflow import DeepReduce

        hvd.init()
        keras, layers = tf.keras, tf.keras.layers
        tf.config.threading.set_intra_op_parallelism_threads(max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))
        keras.utils.set_random_seed(seed)
        sizes = (ratings.user_count, ratings.item_count)
        inputs = [keras.Input((), dtype=tf.int64) for _ in sizes]

        def tables(width: int) -> list[Any]:
            def table(size: int) -> Any:
                start = keras.initializers.RandomNormal(stddev=0.01)
                return layers.Embedding(size, width, embeddings_initializer=start)

            return [table(size)(given) for size, given in zip(sizes, inputs, strict=True)]

        product = layers.Multiply()(tables(factors))
        tower = layers.Concatenate()(tables(2 * factors))
        for width in (4 * factors, 2 * factors, factors):
            tower = layers.Dense(width, "relu")(tower)
        self.model = keras.Model(inputs, layers.Dense(1)(layers.Concatenate()([product, tower]))[:, 0])
        self.hvd, self.tf = hvd, tf
        self.compression = None if method in ("none", "indexed") else DeepReduce(method, seed=seed)
        self.optimizer = keras.optimizers.Adam(lr)
        self.optimizer.build(self.model.trainable_variables)
        hvd.broadcast_variables(self.model.variables, 0)
        variables = self.model.trainable_variables
        self.parameters = sum(v.shape.num_elements() for v in variables)
        self.dense = traffic.allreduce(4 * self.parameters, hvd.size()).sent
        self.sent = 0
        compression = self.compression or hvd.Compression.none

        @tf.function
        def step(users: Any, items: Any, labels: Any) -> Any:
            with tf.GradientTape() as tape:
                scores = self.model([users, items], training=True)
                loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, scores))
            tape = hvd.DistributedGradientTape(tape, compression=compression, sparse_as_dense=method != "indexed")
            gradients = tape.gradient(loss, variables)
            self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
            bytes_sent = tf.constant(0, tf.int64)
            for gradient in gradients:
                # IndexedSlices that Horovod returns contain what all ranks sent; a rank sent its share to the others.
                parts = (gradient.values, gradient.indices) if isinstance(gradient, tf.IndexedSlices) else (gradient,)
                times = (hvd.size() - 1) * (1 if len(parts) > 1 else 2)
                bytes_sent += times * sum(tf.size(part, tf.int64) * part.dtype.size for part in parts) // hvd.size()
            return loss, bytes_sent

        self.run = step

    def step(self, users: np.ndarray, items: np.ndarray, labels: np.ndarray) -> float:
        loss, sent = self.run(*(self.tf.constant(part) for part in (users, items, labels)))
        self.sent += self.compression.stats()["last_step"]["bytes_sent"] if self.compression else int(sent)
        return float(loss)

    def scores(self, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        return self.model([self.tf.constant(users), self.tf.constant(items)]).numpy()

    def mean(self, value: float, name: str) -> float:
        return float(self.hvd.allreduce(self.tf.constant(value, self.tf.float64)))


FRAMEWORKS = {"torch": InTorch, "tensorflow": InTensorFlow}


def hit_rate(job: Any, ratings: Ratings, rank: int, ranks: int) -> float:
    """The share of users whose held-out item is among the TOP of 1 + RANKED items. A tie counts as half a place."""
    users, items = ratings.test_items(rank, ranks)
    hits = 0.0
    for at in range(0, users.size, 1000):
        some, asked = users[at : at + 1000], items[at : at + 1000]
        scores = job.scores(np.repeat(some, asked.shape[1]), asked.reshape(-1)).reshape(asked.shape)
        better = (scores[:, 1:] > scores[:, :1]).sum(1) + 0.5 * (scores[:, 1:] == scores[:, :1]).sum(1)
        hits += float((better < TOP).sum())
    return job.mean(hits * ranks, "hits") / ratings.user_count


@app.command()
def train(
    framework: Annotated[str, typer.Option(help="torch or tensorflow")] = "torch",
    config: Annotated[str, typer.Option(help="a preset, a YAML file, none or indexed")] = "none",
    data: Annotated[Path | None, typer.Option(help="MovieLens, ml-1m or ml-20m; default: a generated table")] = None,
    users: Annotated[int, typer.Option(help="users of a generated table")] = 2000,
    items: Annotated[int, typer.Option(help="items of a generated table")] = 1200,
    epochs: Annotated[int, typer.Option(min=1)] = 6,
    batch_size: Annotated[int, typer.Option(help="pairs per rank and step; 0: as many as there are users")] = 0,
    factors: Annotated[int, typer.Option(min=1, help="factors of the product; the model of the papers has 64")] = 16,
    lr: float = 0.004,
    seed: int = 0,
    out: Annotated[Path, typer.Option(help="JSON file for the figures")] = Path("runs/ncf.json"),
) -> None:
    """Trains with one method, under a launcher. Writes the bytes, hit rate and loss of each epoch to OUT."""
    if framework not in FRAMEWORKS:
        raise SystemExit(f"--framework is {framework!r}; it must be torch or tensorflow")
    ratings = Ratings.read(data) if data else Ratings.generated(users, items, seed)
    job: Any = FRAMEWORKS[framework](ratings, factors, lr, seed, config)
    rank, ranks = job.hvd.rank(), job.hvd.size()
    # With this default, about 40% of the gradient is zero, as in the papers.
    size = min(batch_size or ratings.user_count, ratings.users.size // ranks * (1 + NEGATIVES))
    history = []
    for epoch in range(epochs):
        losses = [job.step(*batch) for batch in ratings.batches(size, rank, ranks, (seed, epoch))]
        rate = hit_rate(job, ratings, rank, ranks)
        dense = job.dense * len(losses)
        history.append({"loss": job.mean(float(np.mean(losses)), "loss"), "hit_rate": rate, "steps": len(losses),
                        "bytes_sent": job.sent, "dense_bytes": dense})  # fmt: skip
        job.sent = 0
        if rank == 0:
            row = history[-1]
            print(f"{config}: epoch {epoch + 1}/{epochs}  loss {row['loss']:.4f}  hit rate {rate:.4f}  "
                  f"sent {row['bytes_sent'] / dense:.4f} of dense", flush=True)  # fmt: skip
            out.parent.mkdir(parents=True, exist_ok=True)
            facts = {"framework": framework, "config": config, "users": ratings.user_count, "items": ratings.item_count,
                     "pairs": int(ratings.users.size), "batch_size": size, "ranks": ranks, "factors": factors, "lr": lr,
                     "parameters": job.parameters, "seed": seed}  # fmt: skip
            out.write_text(json.dumps({**facts, "epochs": history}))
    job.hvd.shutdown()


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def table(
    context: typer.Context,
    framework: Annotated[str, typer.Option(help="torch or tensorflow")] = "tensorflow",
    ranks: Annotated[int, typer.Option(min=1)] = 2,
    configs: Annotated[str, typer.Option(help="comma-separated methods")] = "none,indexed,dr_bf_p0_qsgd,sparse_best",
    out: Annotated[Path, typer.Option(help="folder for the figures of all methods")] = Path("runs/ncf"),
) -> None:
    """Trains with all methods in turn and prints a table. Further options are passed to ``train``.

    The best relative volume in the papers is 0.2063 at equal hit rate.
    """
    shown = Table(title=f"NCF in {framework}, {ranks} ranks", title_justify="left")
    for column in ("method", "relative volume", "best hit rate"):
        shown.add_column(column, justify="left" if column == "method" else "right")
    for config in configs.split(","):
        if config == "indexed" and framework == "torch":
            continue
        file = out / f"{framework}_{Path(config).stem}.json"
        options = ("train", "--framework", framework, "--config", config, "--out", file, *context.args)
        rows = mpirun(ranks, __file__, *options, out=file)["epochs"]
        share = total(rows, "bytes_sent") / total(rows, "dense_bytes")
        shown.add_row(Path(config).stem, f"{share:.4f}", f"{max(row['hit_rate'] for row in rows):.4f}")
    Console(width=100).print(shown)


if __name__ == "__main__":
    app()
