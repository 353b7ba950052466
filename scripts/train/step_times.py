"""Times the steps of a compressed and of a dense job in one run, interleaved, so that both meet the same machine.

    mpirun -np 2 python scripts/train/step_times.py --framework torch --config recommended

Both jobs train the model of train_torch.py or train_tensorflow.py on the same batches. A step's time is that of its
slowest rank, from a barrier to the end of the optimizer's update. Rank 0 writes JSON to OUT: the seconds of each step,
by job, and the bytes of a step. ``Difference`` is what follows.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

BATCH = 32


def interleaved(
    steps: dict[str, Callable[[], None]],
    rounds: int,
    slowest: Callable[[np.ndarray], np.ndarray],
    warm: int = 5,
    prepare: Callable[[str], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """The seconds of each step, in rounds that run every step once.

    A round has the reverse order of the one before. With more than two steps, every other order is drawn, the same on
    all ranks, so that what a step leaves in the caches is not always found by the same one.

    Args:
        slowest: the element-wise maximum over all ranks of float64 ``[n]``. It waits for all ranks, so a step begins
            with it.
        warm: rounds before the first that counts.
        prepare: called with the name of a step before it, outside its time.
        clock: in seconds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    rng, order = random.Random(0), list(steps)
    for number in range(warm + rounds):
        order.reverse()
        if number % 2 == 0 and len(order) > 2:
            rng.shuffle(order)
        for name in order:
            if prepare:
                prepare(name)
            slowest(np.zeros(1))
            begin = clock()
            steps[name]()
            seconds[name].append(clock() - begin)
    return {name: slowest(np.array(times[warm:])).tolist() for name, times in seconds.items()}


@dataclass(frozen=True)
class Difference:
    """What compression costs and saves in a step.

    Attributes:
        compressed, dense: the median seconds of a step.
        extra: by how much a compressed step is longer than the dense step beside it, in seconds: the lower quartile,
            the median and the upper quartile over the pairs. Negative: it is shorter.
        saved: the bytes that a rank sends less.
        pairs: their number.
    """

    compressed: float
    dense: float
    extra: tuple[float, float, float]
    saved: float
    pairs: int

    @classmethod
    def of(cls, found: dict[str, Any]) -> Difference:
        """From what this program wrote."""
        compressed, dense = np.array(found["compressed"]), np.array(found["dense"])
        low, middle, high = np.quantile(compressed - dense, [0.25, 0.5, 0.75]).tolist()
        saved = found["dense_bytes"] - found["bytes_sent"]
        return cls(float(np.median(compressed)), float(np.median(dense)), (low, middle, high), saved, len(dense))

    def pays_below(self) -> tuple[float, float, float]:
        """The bits per second of a rank's link at which the bytes saved take as long as the step is longer: at the
        upper quartile of ``extra``, the median and the lower quartile. Infinite where the step is no longer."""
        low, middle, high = (8 * self.saved / extra if extra > 0 else float("inf") for extra in self.extra[::-1])
        return low, middle, high

    def sentences(self) -> str:
        """What a user needs to know."""
        low, middle, high = (1e3 * extra for extra in self.extra)
        more = f"a rank sends {abs(self.saved) / 1e6:.3g} MB {'less' if self.saved > 0 else 'more'} in a step"
        said = (
            f"In {self.pairs} pairs of interleaved steps, a compressed step took {1e3 * self.compressed:.1f} ms and a "
            f"dense step {1e3 * self.dense:.1f} ms ({self.compressed / self.dense:.2f}x): {middle:+.1f} ms (quartiles "
            f"{low:+.1f} to {high:+.1f}). "
        )
        slow, typical, fast = (speed / 1e9 for speed in self.pays_below())
        if self.saved <= 0:
            return said + f"Compression pays on no link: {more}."
        if self.extra[0] > 0:
            said += (
                "Here, where ranks share the memory of one machine, compression does not pay. On a network it pays on "
                f"links below about {typical:.2g} Gbit/s per rank (quartiles {slow:.2g} to {fast:.2g}): {more}, which "
                "takes longer there than this difference."
            )
        elif self.extra[2] > 0:
            said += (
                "Within their spread, the two are equally fast here, where ranks share the memory of one machine. On a "
                f"network, compression pays on links below {slow:.2g} Gbit/s per rank at least: {more}."
            )
        else:
            said += f"Compression pays here, even where ranks share the memory of one machine: {more}."
        return said + " If sending overlaps with the backward pass, the limit is lower."


def batches(count: int, seed: int, rank: int) -> Iterator[np.ndarray]:
    """The numbers of a rank's images in each step, without end."""
    own, at = np.random.default_rng((seed, rank)).permutation(count), 0
    while True:
        yield own[at : at + BATCH]
        at = (at + BATCH) % (count - BATCH)


def torch_job(name: str, config: str, seed: int) -> tuple[Callable[[], None], Any]:
    """A job in PyTorch: its step, and its compression."""
    import horovod.torch as hvd
    import torch
    from torch.nn import functional
    from train_torch import ResNet, digits

    from hvd_deepreduce.torch import DeepReduce

    images, labels, _, _ = digits()
    feed = map(torch.from_numpy, batches(len(images), seed, hvd.rank()))
    torch.manual_seed(seed)
    model = ResNet()
    # Horovod knows tensors by their names: those of the two jobs differ.
    named = [(f"{name}.{parameter}", tensor) for parameter, tensor in model.named_parameters()]
    compression: Any = hvd.Compression.none if config == "none" else DeepReduce(named, config, seed=seed)
    plain = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=named, compression=compression)

    def step() -> None:
        chosen = next(feed)
        optimizer.zero_grad()
        functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()

    return step, compression


def tensorflow_job(name: str, config: str, seed: int) -> tuple[Callable[[], None], Any]:
    """A job in Keras: ``train_on_batch``, which runs the same function as ``fit``."""
    import horovod.tensorflow as hvd
    from train_tensorflow import digits, keras, resnet

    from hvd_deepreduce.tensorflow import DeepReduce

    images, _, labels, _ = digits()
    feed = batches(len(images), seed, hvd.rank())
    keras.utils.set_random_seed(seed)
    model = resnet()
    compression: Any = hvd.Compression.none if config == "none" else DeepReduce(config, seed=seed)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, 0.9), name=name, compression=compression)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    def step() -> None:
        chosen = next(feed)
        model.train_on_batch(images[chosen], labels[chosen])

    return step, compression


def started(framework: str, threads: int = 0) -> tuple[Any, Callable[[np.ndarray], np.ndarray]]:
    """Starts Horovod for ``torch`` or ``tensorflow``, with so many threads of the framework (0: the rank's share of the
    cores). Returns Horovod's module, and ``slowest`` of ``interleaved``."""
    hvd: Any = import_module(f"horovod.{framework}")
    hvd.init()
    library, threads = import_module(framework), threads or max(1, len(os.sched_getaffinity(0)) // hvd.local_size())
    if framework == "torch":
        library.set_num_threads(threads)
        tensor = library.from_numpy
    else:
        library.config.threading.set_intra_op_parallelism_threads(threads)
        tensor = library.constant
    return hvd, lambda times: hvd.allgather(tensor(times[None]), name="times").numpy().max(0)


def main(
    framework: Annotated[str, typer.Option(help="torch or tensorflow")] = "torch",
    config: Annotated[str, typer.Option(help="a preset or a YAML file")] = "recommended",
    pairs: Annotated[int, typer.Option(min=2, help="pairs of steps that are counted")] = 100,
    seed: int = 0,
    out: Annotated[Path, typer.Option(help="JSON file")] = Path("runs/step_times.json"),
) -> None:
    """Times the steps of both jobs."""
    hvd, slowest = started(framework)
    job = {"torch": torch_job, "tensorflow": tensorflow_job}[framework]
    dense, compressed = job("dense", "none", seed), job("compressed", config, seed)
    seconds = interleaved({"dense": dense[0], "compressed": compressed[0]}, pairs, slowest)
    last = compressed[1].stats()["last_step"]
    if hvd.rank() == 0:
        out.parent.mkdir(parents=True, exist_ok=True)
        facts = {"framework": framework, "config": config, "ranks": hvd.size(), "batch_size": BATCH}
        out.write_text(json.dumps({**facts, **seconds, **{key: last[key] for key in ("bytes_sent", "dense_bytes")}}))
    hvd.shutdown()


if __name__ == "__main__":
    typer.run(main)
