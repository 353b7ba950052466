"""Times whole steps of a job whose gradients take almost no time to compute: what compression adds to a step.

    mpirun -np 2 python scripts/bench/bench_step.py --shapes resnet50 --shapes small
    mpirun -np 2 python scripts/bench/bench_step.py --framework tensorflow --jobs dense --jobs bucket --rounds 50

The steps of all jobs are interleaved in one run, with one thread a rank. ``local`` is the step without communication:
backward pass and update. ``alone`` is no step: the pipeline encodes one vector of as many elements as the model has
and decodes the containers of all ranks. What a job costs beyond ``local`` is compared with it.

Rank 0 prints one line of JSON for each shape: the milliseconds of each job, medians over the rounds, and quartiles.
"""

import json
import os
import resource
import sys
from collections.abc import Callable
from importlib import import_module
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("train",))

import numpy as np
import typer
from step_times import interleaved, started

from hvd_deepreduce import Config
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.engine import dense_or_compressed
from hvd_deepreduce.pipeline import Pipeline, bundle

PRESET = "recommended"
MORE_ROUNDS = 8
"""Small models take so many times as many rounds, since their short steps vary more."""
SMALL = 2_000_000
"""Elements up to which a model is small."""
JOBS: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "fp16": None,
    "default": {},
    "tensor": {"scope": "tensor"},
    "bucket": {"scope": "bucket"},
    "model": {"scope": "model"},
    "densestream": {"scope": "model", "exchange": "densestream", "value": None, "index": None},
    "auto": {"mode": "auto"},
}
TRIAL = dense_or_compressed.WARM_UP + dense_or_compressed.BLOCK * dense_or_compressed.BLOCKS + 5
"""Steps after which a job with ``mode: auto`` has decided."""
FRAMEWORKS = "torch", "tensorflow"
Step = Callable[[], object]


def bert_base() -> list[int]:
    """Elements of the tensors of BERT-base (Devlin et al., 2019, section 3): 12 layers of width 768."""
    layer = 4 * [768 * 768, 768] + 2 * [768] + [768 * 3072, 3072, 3072 * 768, 768] + 2 * [768]
    return [30522 * 768, 512 * 768, 2 * 768, 768, 768, *12 * layer, 768 * 768, 768]


def resnet50() -> list[int]:
    """Elements of the 161 tensors of ResNet-50 (He et al., 2016, Table 1)."""
    sizes, channels = [7 * 7 * 3 * 64, 64, 64], 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolutions = [channels * width, 9 * width * width, 4 * width * width]
            for size, filters in zip(convolutions, (width, width, 4 * width), strict=True):
                sizes += [size, filters, filters]
            if block == 0:
                sizes += [channels * 4 * width, 4 * width, 4 * width]
            channels = 4 * width
    return [*sizes, channels * 1000, 1000]


SHAPES: dict[str, Callable[[], list[int]]] = {
    "resnet50": resnet50,
    "many": lambda: 100 * [10_000],
    "small": lambda: 161 * [1_000],
    "large": lambda: 60 * [400_000],
    "bert": bert_base,
}


class Gradients:
    """Heavy-tailed gradients: normal numbers, times a log-normal scale for each element; float32.

    Four vectors take turns, so that residuals do not settle. The gradient of tensor i begins at element i of the
    vector: a graph would reduce equal gradients once.
    """

    def __init__(self, sizes: list[int], rank: int) -> None:
        rng = np.random.default_rng(rank)
        length = max(sizes) + len(sizes)
        scale = np.exp(rng.standard_normal(length, np.float32))
        self.vectors = [1e-3 * scale * rng.standard_normal(length, np.float32) for _ in range(4)]


def torch_job(name: str, sizes: list[int], gradients: Gradients) -> tuple[Step, Any]:
    """One job's step, and its compression."""
    import torch
    from given import Given, horovod_job

    settings = JOBS.get(name)
    step, compression = horovod_job(name, Given(sizes), name if settings is None else PRESET, **(settings or {}))
    vectors = [torch.from_numpy(vector) for vector in gradients.vectors]
    turns = cycle([[one[at : at + size] for at, size in enumerate(sizes)] for one in vectors])
    return lambda: step(next(turns)), compression


def tensorflow_job(name: str, sizes: list[int], gradients: Gradients) -> tuple[Step, Any]:
    """One job's step, a ``tf.function``, and its compression. TensorFlow cannot compute the gradients beforehand, since
    they depend on which of the vectors is given."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from hvd_deepreduce.tensorflow import DeepReduce

    compression: Any = hvd.Compression.fp16 if name == "fp16" else hvd.Compression.none
    settings = JOBS.get(name)
    if settings is not None:
        compression = DeepReduce(PRESET, **settings)
    variables = [tf.Variable(tf.zeros(size)) for size in sizes]
    turns = cycle([tf.constant(vector) for vector in gradients.vectors])

    @tf.function
    def graph(weights: Any) -> None:
        with tf.name_scope(name):  # Horovod knows tensors by their names: those of the jobs differ
            with tf.GradientTape() as tape:
                parts = enumerate(variables)
                loss = tf.add_n([tf.reduce_sum(one * weights[at : at + one.shape[0]]) for at, one in parts])
            if name != "local":
                tape = hvd.DistributedGradientTape(tape, compression=compression)
            for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
                variable.assign_sub(1e-3 * gradient)

    return lambda: graph(next(turns)), compression


def pipeline_alone(numel: int, gradients: Gradients, ranks: int) -> Step:
    """Encodes one vector of ``numel`` elements, and decodes and adds up the containers of all ranks."""
    pipeline = Pipeline(Config.load(PRESET), 1)
    whole = np.resize(gradients.vectors[0], numel)
    residual, spare, out = np.zeros_like(whole), np.zeros_like(whole), np.empty_like(whole)
    step = 0

    def run() -> None:
        nonlocal step, residual, spare
        step += 1
        key = RngKey(0, 0, step)
        own = pipeline.encode(whole, residual, key, 2, into=spare)  # as in a job
        residual, spare = spare, residual
        gathered = np.concatenate([own] * ranks)
        bundle.sum_into(out, gathered, ranks, [bundle.Slice(pipeline, (0, numel), key)], 1 / ranks)

    return run


def main(
    framework: Annotated[str, typer.Option(help="torch or tensorflow")] = "torch",
    shapes: Annotated[list[str], typer.Option(help="models, by their shapes: " + ", ".join(SHAPES))] = [*SHAPES][:4],
    jobs: Annotated[list[str], typer.Option(help="besides local and alone: " + ", ".join(JOBS))] = [*JOBS],  # noqa: B006
    rounds: Annotated[int, typer.Option(min=2, help="steps of each job that count; small models take more")] = 20,
    warm: Annotated[int, typer.Option(min=1, help="steps of each job before")] = 3,
    peak: Annotated[bool, typer.Option(help="the peak memory of one job's process, in place of times")] = False,
) -> None:
    """Times the steps of all jobs, or finds the peak memory of one."""
    if peak and (len(shapes), len(jobs)) != (1, 1):
        raise typer.BadParameter("--peak is for one process with one --shapes and one --jobs")
    for given, known in (([framework], FRAMEWORKS), (shapes, SHAPES), (jobs, JOBS)):
        if unknown := set(given) - set(known):
            raise typer.BadParameter(f"{', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    hvd, slowest = started(framework, 1)
    job = {"torch": torch_job, "tensorflow": tensorflow_job}[framework]
    if framework == "tensorflow":
        import_module("tensorflow").config.threading.set_inter_op_parallelism_threads(1)
    for shape in shapes:
        sizes = SHAPES[shape]()
        gradients = Gradients(sizes, hvd.rank())
        if peak:
            step, _ = job(jobs[0], sizes, gradients)
            for _ in range(warm + rounds):
                step()
            if hvd.rank() == 0:
                facts = {"framework": framework, "job": jobs[0], "gradient_mib": 4 * sum(sizes) / 2**20}
                print(json.dumps({**facts, "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10}))
            break
        made = {name: job(name, sizes, gradients) for name in ["local", *jobs]}
        steps = {name: step for name, (step, _) in made.items()}
        for name in jobs:
            if (JOBS[name] or {}).get("mode") == "auto":  # it decides by steps that follow each other
                for _ in range(TRIAL):
                    steps[name]()
        steps["alone"] = pipeline_alone(sum(sizes), gradients, hvd.size())
        counted = rounds * MORE_ROUNDS if sum(sizes) <= SMALL else rounds
        found = interleaved(steps, counted, slowest, warm)
        if hvd.rank() == 0:
            quartiles = {name: (1e3 * np.quantile(times, [0.25, 0.5, 0.75])).tolist() for name, times in found.items()}
            facts = {"framework": framework, "shape": shape, "tensors": len(sizes), "numel": sum(sizes)}
            facts["rounds"] = counted
            said = [one.stats().said for _, one in made.values() if getattr(one, "config", None) is not None]
            facts |= {"ranks": hvd.size(), "load": os.getloadavg()[0], "said": [one for one in said if one]}
            print(json.dumps({**facts, "ms": quartiles}), flush=True)
        for _, compression in made.values():
            if hasattr(compression, "close"):
                compression.close()
    hvd.shutdown()


if __name__ == "__main__":
    typer.run(main)
