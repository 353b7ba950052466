"""Times the steps of a compressed and of a dense job in one run, interleaved, so that both meet the same machine.

    mpirun -np 2 python scripts/train/step_times.py --framework torch --config recommended

Both jobs train the model of train_torch.py or train_tensorflow.py on the same batches. Their steps alternate, and the
order changes from pair to pair. A step's time is that of its slowest rank, from a barrier to the end of the optimizer's
update: forward and backward pass, encoding, communication, decoding, update.

Rank 0 writes JSON to OUT: the seconds of each step, by job, and the bytes of a step. ``Difference`` is what follows.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
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


def torch_jobs(config: str, seed: int) -> tuple[dict[str, Callable[[], None]], Any]:
    """The two jobs in PyTorch: their steps, and the compression."""
    import os

    import horovod.torch as hvd
    import torch
    from torch.nn import functional
    from train_torch import ResNet, digits

    from hvd_deepreduce.torch import DeepReduce

    hvd.init()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))
    images, labels, _, _ = digits()
    own = torch.from_numpy(np.random.default_rng((seed, hvd.rank())).permutation(len(images)))
    compression: Any = None

    def job(name: str, given: str) -> Callable[[], None]:
        nonlocal compression
        torch.manual_seed(seed)
        model = ResNet()
        # Horovod knows tensors by their names: those of the two jobs differ.
        named = [(f"{name}.{parameter}", tensor) for parameter, tensor in model.named_parameters()]
        used: Any = hvd.Compression.none if given == "none" else DeepReduce(named, given, seed=seed)
        compression = compression if given == "none" else used
        plain = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
        optimizer = hvd.DistributedOptimizer(plain, named_parameters=named, compression=used)
        at = 0

        def step() -> None:
            nonlocal at
            chosen = own[at : at + BATCH]
            at = (at + BATCH) % (len(own) - BATCH)
            optimizer.zero_grad()
            functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()

        return step

    jobs = {"dense": job("dense", "none"), "compressed": job("compressed", config)}
    return jobs, compression


def tensorflow_jobs(config: str, seed: int) -> tuple[dict[str, Callable[[], None]], Any]:
    """The two jobs in Keras: ``train_on_batch``, which runs the same function as ``fit``."""
    import os

    import horovod.tensorflow as hvd
    import tensorflow as tf
    from train_tensorflow import digits, resnet

    from hvd_deepreduce.tensorflow import DeepReduce

    keras = tf.keras
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))
    images, _, labels, _ = digits()
    own = np.random.default_rng((seed, hvd.rank())).permutation(len(images))
    compression: Any = None

    def job(name: str, given: str) -> Callable[[], None]:
        nonlocal compression
        keras.utils.set_random_seed(seed)
        model = resnet()
        used: Any = hvd.Compression.none if given == "none" else DeepReduce(given, seed=seed)
        compression = compression if given == "none" else used
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, 0.9), name=name, compression=used)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        at = 0

        def step() -> None:
            nonlocal at
            chosen = own[at : at + BATCH]
            at = (at + BATCH) % (len(own) - BATCH)
            model.train_on_batch(images[chosen], labels[chosen])

        return step

    jobs = {"dense": job("dense", "none"), "compressed": job("compressed", config)}
    return jobs, compression


def main(
    framework: Annotated[str, typer.Option(help="torch or tensorflow")] = "torch",
    config: Annotated[str, typer.Option(help="a preset or a YAML file")] = "recommended",
    pairs: Annotated[int, typer.Option(min=2, help="pairs of steps that are counted")] = 100,
    seed: int = 0,
    out: Annotated[Path, typer.Option(help="JSON file")] = Path("runs/step_times.json"),
) -> None:
    """Times the steps of both jobs."""
    jobs, compression = {"torch": torch_jobs, "tensorflow": tensorflow_jobs}[framework](config, seed)
    if framework == "torch":
        import horovod.torch as hvd
        import torch

        def slowest(times: np.ndarray) -> np.ndarray:
            return hvd.allgather(torch.from_numpy(times)[None], name="times").numpy().max(0)
    else:
        import horovod.tensorflow as hvd
        import tensorflow as tf

        def slowest(times: np.ndarray) -> np.ndarray:
            return hvd.allgather(tf.constant(times[None]), name="times").numpy().max(0)

    seconds = interleaved(jobs, pairs, slowest)
    last = compression.stats()["last_step"]
    if hvd.rank() == 0:
        out.parent.mkdir(parents=True, exist_ok=True)
        facts = {"framework": framework, "config": config, "ranks": hvd.size(), "batch_size": BATCH}
        out.write_text(
            json.dumps({**facts, **seconds, "bytes_sent": last["bytes_sent"], "dense_bytes": last["dense_bytes"]})
        )
    hvd.shutdown()


if __name__ == "__main__":
    typer.run(main)
