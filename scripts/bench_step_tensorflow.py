"""Times a step of TensorFlow: without communication, dense, fp16, and compressed in each scope, interleaved in one run.

    mpirun -np 2 python scripts/bench_step_tensorflow.py
    mpirun -np 2 python scripts/bench_step_tensorflow.py --model resnet50 --jobs local,dense,model --steps 40

A step is a ``tf.function``: the gradient of each tensor is one multiplication of the tensor itself by a constant, which
TensorFlow cannot compute beforehand, and the update is plain SGD. So almost all of a step is exchange. ``local`` is the
same step without Horovod. A step's time is that of its slowest rank; the table has medians.

- overhead: step less ``local``.
- / codec: the overhead, relative to encode + decode of the same vector by the pipeline alone, in the same run, with
  the containers of all ranks.
- us a tensor: what the step takes beyond the dense step beside it, less encode + decode, for each tensor.

``--processor`` measures the time of all threads of a rank on processors, in place of the time on the clock. That can be
compared on a machine that does other things as well, where ranks do not poll: ``horovodrun --gloo``.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

CONFIG = "topk_rice_qsgd"
JOBS = "local,dense,fp16,tensor,bucket,model"
SCOPES = ("tensor", "bucket", "model")


def resnet50() -> list[tuple[int, ...]]:
    """The shapes of ResNet-50's 161 tensors (He et al., 2016, Table 1), as Keras has them; 25.6 M elements."""
    shapes: list[tuple[int, ...]] = [(7, 7, 3, 64), (64,), (64,)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolutions = [(1, 1, channels, width), (3, 3, width, width), (1, 1, width, 4 * width)]
            if block == 0:
                convolutions.append((1, 1, channels, 4 * width))
            for shape in convolutions:
                shapes += [shape, shape[-1:], shape[-1:]]
            channels = 4 * width
    return [*shapes, (channels, 1000), (1000,)]


MODELS: dict[str, Callable[[], list[tuple[int, ...]]]] = {
    "100 x 10,000": lambda: [(100, 100)] * 100,
    "161 x 1,000": lambda: [(1000,)] * 161,
    "60 x 400,000": lambda: [(400, 1000)] * 60,
    "resnet50": resnet50,
}


def job(name: str, number: int, config: str, shapes: list[tuple[int, ...]], rank: int, python: bool) -> tuple[Any, Any]:
    """A job's compression, and a function that runs one of its steps."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from hvd_deepreduce.tensorflow import DeepReduce

    compression: Any = hvd.Compression.none
    if name == "fp16":
        compression = hvd.Compression.fp16
    elif name in SCOPES:
        compression = DeepReduce(config, scope=name)
        if python:
            compression._operations.native = None
    rng = np.random.default_rng(0)
    variables = [tf.Variable(rng.standard_normal(shape).astype(np.float32)) for shape in shapes]
    rng = np.random.default_rng(1 + rank)
    weights = [tf.Variable(rng.standard_normal(shape).astype(np.float32), trainable=False) for shape in shapes]

    @tf.function
    def step() -> None:
        # Horovod knows tensors by their names: those of the jobs differ, or each step would negotiate anew.
        with tf.name_scope(f"job{number}"):
            with tf.GradientTape() as tape:
                terms = [tf.reduce_sum(w * v * v) for w, v in zip(weights, variables, strict=True)]
                loss = tf.add_n(terms)
            if name != "local":
                tape = hvd.DistributedGradientTape(tape, compression=compression)
            for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
                variable.assign_sub(1e-6 * gradient)

    return compression, step


def codec_seconds(config: str, numel: int, ranks: int, rounds: int) -> Callable[[], None]:
    """A function that encodes a vector and decodes the containers of all ranks, with the pipeline alone."""
    from hvd_deepreduce import Config
    from hvd_deepreduce.codec import RngKey
    from hvd_deepreduce.pipeline import Pipeline

    pipeline = Pipeline(Config.load(config, scope="model"))
    gradients = [np.random.default_rng(rank).standard_normal(numel).astype(np.float32) for rank in range(ranks)]
    for gradient in gradients:
        gradient *= np.random.default_rng(9).standard_normal(numel).astype(np.float32)
    residuals = [np.zeros(numel, np.float32) for _ in range(ranks)]
    out, at = np.empty(numel, np.float32), 0
    key = RngKey(0, 0, 0)
    others = [
        pipeline.encode(gradient, residual, key._replace(rank=rank), 2)
        for rank, (gradient, residual) in enumerate(zip(gradients, residuals, strict=True))
    ]
    del gradients[1:], residuals[1:]

    def run() -> None:
        nonlocal at
        at += 1
        pipeline.encode(gradients[0], residuals[0], key._replace(step=at), 2)
        pipeline.decode(pipeline.unpack(np.concatenate(others), ranks, numel, out.dtype, key), out, 1 / ranks, key)

    return run


def main(
    model: Annotated[str, typer.Option(help=f"{'; '.join(MODELS)}, or some of them")] = "; ".join(MODELS),
    jobs: Annotated[str, typer.Option(help="comma-separated")] = JOBS,
    config: Annotated[str, typer.Option(help="a preset or a YAML file; its scope is replaced")] = CONFIG,
    steps: Annotated[int, typer.Option(min=1, help="steps of each job that are counted")] = 30,
    threads: Annotated[int, typer.Option(min=1, help="TensorFlow's threads between operations, and within")] = 1,
    processor: Annotated[bool, typer.Option(help="time on processors in place of the clock's")] = False,
    python: Annotated[bool, typer.Option(help="Python functions in place of the operations in C++")] = False,
    out: Annotated[Path | None, typer.Option(help="JSON file for all seconds")] = None,
) -> None:
    """Times the steps of all jobs on one model after the other."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import horovod.tensorflow as hvd
    import tensorflow as tf
    from step_times import interleaved

    hvd.init()
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    tf.config.threading.set_intra_op_parallelism_threads(threads)

    def slowest(times: np.ndarray) -> np.ndarray:
        return hvd.allgather(tf.constant(times[None]), name="times").numpy().max(0)

    found = {}
    number = 0
    for one in map(str.strip, model.split(";")):
        shapes = MODELS[one]()
        numel = sum(int(np.prod(shape)) for shape in shapes)
        timed: dict[str, Callable[[], None]] = {}
        compressions = []
        for name in jobs.split(","):
            number += 1
            compression, step = job(name, number, config, shapes, hvd.rank(), python)
            timed[name] = step
            if name in SCOPES:
                compressions.append(compression)
        timed["codec"] = codec_seconds(config, numel, hvd.size(), steps)
        seconds = interleaved(timed, steps, slowest, clock=time.process_time if processor else time.perf_counter)
        for compression in compressions:
            compression.close()
        found[one] = seconds
        if hvd.rank() == 0:
            median = {name: 1e3 * float(np.median(times)) for name, times in seconds.items()}
            local, dense, codec = median.get("local", 0.0), median.get("dense", 0.0), median["codec"]
            print(f"\n{one}: {len(shapes)} tensors, {numel:,} elements, {hvd.size()} ranks")
            print(f"{'':8}{'step, ms':>10}{'overhead':>10}{'/ codec':>9}{'us a tensor':>13}")
            for name in timed:
                over = median[name] - local
                more = f"{over:10.1f}" if name not in ("local", "codec") else f"{'':10}"
                if name in SCOPES:
                    more += f"{over / codec:9.2f}{1e3 * (median[name] - dense - codec) / len(shapes):13.0f}"
                print(f"{name:8}{median[name]:10.1f}{more}", flush=True)
    if out is not None and hvd.rank() == 0:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(found))
    hvd.shutdown()


if __name__ == "__main__":
    typer.run(main)
