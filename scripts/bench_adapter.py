"""Measures the overhead of an adapter, in a step whose gradients take almost no time to compute.

    mpirun -np 2 python scripts/bench_adapter.py torch
    mpirun -np 2 python scripts/bench_adapter.py tensorflow

Rank 0 prints one line of JSON: the milliseconds of a step without compression (``dense``) and with it (``step``), and
the milliseconds of encoding, waiting and decoding in the compressed step. All are medians over the steps.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer

CONFIG = "topk_rice_qsgd"
PARTS = ("encode", "wait", "decode")


def torch_step(compressed: bool, tensors: int, numel: int) -> tuple[Any, Callable[[], None], int]:
    """A PyTorch job: its compression, a function that runs one step, and the number of this rank."""
    import horovod.torch as hvd
    import torch

    from hvd_deepreduce.torch import DeepReduce

    hvd.init()
    torch.set_num_threads(1)
    # Horovod identifies tensors by name, and both optimizers exist at the same time, so their names must differ.
    names = [f"{compressed}{number:04}" for number in range(tensors)]
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.ones(numel)) for name in names})
    compression = DeepReduce(model, CONFIG) if compressed else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), named_parameters=model.named_parameters(), compression=compression
    )
    weights = torch.from_numpy(np.random.default_rng(hvd.rank()).standard_normal(numel).astype(np.float32))

    def step() -> None:
        optimizer.zero_grad()
        torch.stack([parameter @ weights for parameter in model.values()]).sum().backward()
        optimizer.step()

    return compression, step, hvd.rank()


def tensorflow_step(compressed: bool, tensors: int, numel: int) -> tuple[Any, Callable[[], None], int]:
    """The same job in a tf.function. It has one thread, so that encoding and decoding do not overlap."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from hvd_deepreduce.tensorflow import DeepReduce

    if not hvd.is_initialized():
        hvd.init()
        tf.config.threading.set_inter_op_parallelism_threads(1)
        tf.config.threading.set_intra_op_parallelism_threads(1)
    variables = [tf.Variable(tf.ones(numel)) for _ in range(tensors)]
    compression = DeepReduce(CONFIG) if compressed else hvd.Compression.none
    weights = tf.constant(np.random.default_rng(hvd.rank()).standard_normal(numel), tf.float32)

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(variable * weights) for variable in variables])
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.0 * gradient)

    return compression, step, int(hvd.rank())


def main(
    framework: Annotated[str, typer.Argument(help="torch or tensorflow")],
    tensors: Annotated[int, typer.Option(help="number of parameters of the model")] = 100,
    numel: Annotated[int, typer.Option(help="elements of each parameter")] = 10_000,
    steps: Annotated[int, typer.Option(help="steps that are counted")] = 30,
) -> None:
    """Measures the adapter of one framework."""
    make = {"torch": torch_step, "tensorflow": tensorflow_step}[framework]
    found: dict[str, Any] = {"framework": framework, "tensors": tensors, "numel": numel}
    rank = 0
    for name, compressed in (("dense", False), ("step", True)):
        compression, step, rank = make(compressed, tensors, numel)
        times: dict[str, list[float]] = {part: [] for part in ("all", *PARTS)}
        for number in range(steps + 3):
            begin = time.perf_counter()
            step()
            if number < 3:
                continue
            times["all"].append(time.perf_counter() - begin)
            for part in PARTS if compressed else ():
                times[part].append(compression.stats()["last_step"][f"{part}_seconds"])
        found[name] = 1e3 * median(times["all"])
        if compressed:
            found.update({part: 1e3 * median(times[part]) for part in PARTS})
    if rank == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    typer.run(main)
