"""Times whole steps of a job whose gradients take almost no time to compute: what compression adds to a step.

    mpirun -np 2 python scripts/bench_step.py --shapes resnet50 --shapes small
    mpirun -np 2 python scripts/bench_step.py --jobs dense --jobs bucket --rounds 50

The steps of all jobs are interleaved in one run, with one thread a rank. ``local`` is the step without communication:
backward pass and update. ``alone`` is no step: the pipeline encodes one vector of as many elements as the model has
and decodes the containers of all ranks. What a job costs beyond ``local`` is compared with it.

Rank 0 prints one line of JSON for each shape: the milliseconds of each job, medians over the rounds, and quartiles.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Annotated, Any

import horovod.torch as hvd
import numpy as np
import numpy.typing as npt
import torch
import typer
from networks import NETWORKS
from step_times import interleaved

from hvd_deepreduce import Config, short_container
from hvd_deepreduce.codec import RngKey
from hvd_deepreduce.decoding import decode_part
from hvd_deepreduce.ops import arrays
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.torch import DeepReduce

PRESET = "topk_rice_qsgd"
JOBS: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "fp16": None,
    "default": {},
    "tensor": {"scope": "tensor"},
    "bucket": {"scope": "bucket"},
    "model": {"scope": "model"},
    "densestream": {"scope": "model", "exchange": "densestream", "value": None, "index": None},
}


def bert_base() -> list[int]:
    """Elements of the tensors of BERT-base (Devlin et al., 2019, section 3): 12 layers of width 768."""
    layer = 4 * [768 * 768, 768] + 2 * [768] + [768 * 3072, 3072, 3072 * 768, 768] + 2 * [768]
    return [30522 * 768, 512 * 768, 2 * 768, 768, 768, *12 * layer, 768 * 768, 768]


def resnet50() -> list[int]:
    """Elements of the tensors of ResNet-50."""
    with torch.device("meta"):
        return [parameter.numel() for parameter in NETWORKS["resnet50"](1000).parameters()]


SHAPES: dict[str, Callable[[], list[int]]] = {
    "resnet50": resnet50,
    "many": lambda: 100 * [10_000],
    "small": lambda: 161 * [1_000],
    "large": lambda: 60 * [400_000],
    "bert": bert_base,
}


class Gradients:
    """Heavy-tailed gradients: normal numbers, times a log-normal scale for each element; ``[largest tensor]``.

    Four vectors take turns, so that residuals do not settle.
    """

    def __init__(self, sizes: list[int], rank: int) -> None:
        rng = np.random.default_rng(rank)
        scale = np.exp(rng.standard_normal(max(sizes), np.float32))
        self._vectors = [torch.from_numpy(1e-3 * scale * rng.standard_normal(max(sizes), np.float32)) for _ in range(4)]
        self._at = 0

    def next(self) -> torch.Tensor:
        """The vector of the next step; a tensor's gradient is its beginning."""
        self._at += 1
        return self._vectors[self._at % 4]


def torch_job(name: str, sizes: list[int], gradients: Gradients) -> tuple[Callable[[], None], DeepReduce | None]:
    """One job's step, and its compression."""
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    # Horovod knows tensors by their names: those of the jobs differ.
    named = [(f"{name}.{number:03}", parameter) for number, parameter in enumerate(parameters)]
    optimizer: Any = torch.optim.SGD(parameters, lr=1e-3)
    compression: Any = hvd.Compression.fp16 if name == "fp16" else hvd.Compression.none
    settings = JOBS.get(name)
    if settings is not None:
        compression = DeepReduce(named, PRESET, **settings)
    if name != "local":
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compression)

    def step() -> None:
        optimizer.zero_grad()
        weights = gradients.next()
        torch.stack([parameter.dot(weights[: parameter.numel()]) for parameter in parameters]).sum().backward()
        optimizer.step()

    return step, compression if settings is not None else None


def pipeline_alone(numel: int, gradients: Gradients, ranks: int) -> Callable[[], None]:
    """Encodes one vector of ``numel`` elements, and decodes and adds up the containers of all ranks."""
    pipeline = Pipeline(Config.load(PRESET), 1)
    whole = np.resize(gradients.next().numpy(), numel)
    residual, out = np.zeros_like(whole), np.empty_like(whole)
    step = 0

    def run() -> None:
        nonlocal step
        step += 1
        key = RngKey(0, 0, step)
        own = pipeline.encode(whole, residual, key, 2)
        gathered = np.concatenate([own] * ranks)
        (containers,) = short_container.split(gathered, ranks, [pipeline.expected(numel, out.dtype, key)])
        arrays.sum_into(out, [decode_part(one, numel) for one in containers], 1 / ranks, 1)

    return run


def slowest(times: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The element-wise maximum over all ranks."""
    found: npt.NDArray[np.float64] = hvd.allgather(torch.from_numpy(times)[None], name="times").numpy().max(0)
    return found


def main(
    shapes: Annotated[list[str], typer.Option(help="models, by their shapes: " + ", ".join(SHAPES))] = [*SHAPES][:4],
    jobs: Annotated[list[str], typer.Option(help="besides local and alone: " + ", ".join(JOBS))] = [*JOBS],  # noqa: B006
    rounds: Annotated[int, typer.Option(min=2, help="steps of each job that count")] = 20,
) -> None:
    """Times the steps of all jobs."""
    for given, known in ((shapes, SHAPES), (jobs, JOBS)):
        if unknown := set(given) - set(known):
            raise typer.BadParameter(f"{', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    hvd.init()
    torch.set_num_threads(1)
    for shape in shapes:
        sizes = SHAPES[shape]()
        gradients = Gradients(sizes, hvd.rank())
        made = {name: torch_job(name, sizes, gradients) for name in ["local", *jobs]}
        steps = {name: step for name, (step, _) in made.items()}
        steps["alone"] = pipeline_alone(sum(sizes), gradients, hvd.size())
        found = interleaved(steps, rounds, slowest, warm=3)
        if hvd.rank() == 0:
            quartiles = {name: (1e3 * np.quantile(times, [0.25, 0.5, 0.75])).tolist() for name, times in found.items()}
            facts = {"shape": shape, "tensors": len(sizes), "numel": sum(sizes), "ranks": hvd.size()}
            print(json.dumps({**facts, "load": os.getloadavg()[0], "ms": quartiles}), flush=True)
        for _, compression in made.values():
            if compression is not None:
                compression.close()
    hvd.shutdown()


if __name__ == "__main__":
    typer.run(main)
