"""``hvd-deepreduce advise``: predicts the step times of dense gradients and of presets, and says which to take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hvd_deepreduce import Config, captured, prediction, speeds
from hvd_deepreduce.advice import GRADIENTS, UPDATES, Advice
from hvd_deepreduce.advice import advise as advise_job
from hvd_deepreduce.command import gradients, output, ranks
from hvd_deepreduce.command.output import ExitCode, Json
from hvd_deepreduce.engine import cores

EPILOG = (
    """Examples:

  hvd-deepreduce advise 25.6M --ranks 4 --bandwidth 1G --compute 100

  hvd-deepreduce advise gradients.npz --ranks 16 --per-host 4 --bandwidth 10G --dense-step 400 --json

  mpirun -np 4 hvd-deepreduce advise 25.6M --measure --compute 100

"""
    + output.EXIT_CODES
)
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
TENSOR, MOST_TENSORS = 160_000, 1000
LATENCY = 50.0
"""Microseconds of a message over TCP, unless given."""


def number(text: str, what: str) -> float:
    """A positive number with a unit: ``25.6M``, ``10G``."""
    unit = text[-1:].lower() if text[-1:].lower() in "kmg" else ""
    try:
        found = float(text[: len(text) - len(unit)]) * UNITS[unit]
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        output.fail(
            f"{what} is {text!r}; it must be a positive number, which may end in K, M or G, such as 25.6M",
            ExitCode.USAGE,
        )
    return found


def sizes_of(model: str) -> list[int]:
    """Elements of the tensors of a model, from its number of elements or from those of all tensors.

    The former is divided into equal tensors of about ``TENSOR``, as large as ResNet-50's are.
    """
    sizes = [round(number(part, "MODEL")) for part in model.split(",")]
    if len(sizes) == 1:
        whole, count = sizes[0], min(MOST_TENSORS, max(1, sizes[0] // TENSOR))
        sizes = [whole // count + (place < whole % count) for place in range(count)]
    if min(sizes) < 1:
        output.fail(f"MODEL is {model!r}; a tensor has 1 element or more", ExitCode.USAGE)
    return sizes


def vectors_of(file: Path) -> tuple[list[int], Callable[[Config], Sequence[captured.Vector]]]:
    """Elements of the tensors in a file of gradients, and what a config selects from: the accumulator with error
    feedback, if the file has one, and otherwise the gradient."""
    given = gradients.usable(gradients.load(file))
    raw = given
    try:
        raw = gradients.load(file, "gradient")
    except (gradients.GradientError, captured.CaptureError):
        pass  # it has one vector alone
    return given.sizes, lambda config: [(given if config.error_feedback else raw).vector]


def advise(
    model: Annotated[
        str,
        typer.Argument(
            help="The number of parameters (25.6M), the sizes of all tensors (64,4096,1M), or a file of gradients "
            "(.npz, .npy, .pt)."
        ),
    ],
    rank_count: Annotated[int | None, typer.Option("--ranks", min=2, help="Ranks in all.")] = None,
    per_host: Annotated[
        int | None, typer.Option("--per-host", min=1, help="Ranks on each host, which share its link. Default: 1.")
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help="Bits per second of a host's link, in each direction: 1G, 100M.")
    ] = None,
    latency: Annotated[float, typer.Option(min=0, help="Microseconds of a message.")] = LATENCY,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Measure the link between the ranks of this mpirun or torchrun."),
    ] = False,
    compute: Annotated[
        float, typer.Option(min=0, help="Milliseconds of a step on one rank, without any exchange.")
    ] = 0.0,
    dense_step: Annotated[
        float | None, typer.Option(min=0, help="Measured milliseconds of a dense step, in place of --compute.")
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            help="A preset's name or a YAML file; can be repeated. Default: " + ", ".join((*GRADIENTS, *UPDATES)) + "."
        ),
    ] = None,
    rank_cores: Annotated[
        float | None,
        typer.Option("--cores", help="Cores of a rank; below 1, ranks share them. Default: this machine's.", min=0.01),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads that a rank computes with. Default: one for each of its cores.")
    ] = None,
    tensor_overhead: Annotated[
        float, typer.Option(min=0, help="Microseconds that the framework takes for each tensor.")
    ] = 1e6 * prediction.TENSOR_OVERHEAD,
    as_json: Json = False,
) -> None:
    """Predicts the time of a training step, dense and under presets, and says which to take."""
    with output.errors_as_sentences():
        if model.lower().endswith(gradients.SUFFIXES):
            sizes, vectors = vectors_of(Path(model))
        else:
            sizes, vectors = sizes_of(model), None
        configs = [(name, Config.load(name)) for name in config or (*GRADIENTS, *UPDATES)]
    collectives = ranks.of_launcher() if measure else None
    if collectives is not None:
        rank_count = rank_count or collectives.ranks
        per_host = per_host or ranks.on_this_host(collectives)
    elif measure:
        output.fail(
            "--measure needs the ranks of a job: run mpirun -np 4 hvd-deepreduce advise MODEL --measure, or torchrun "
            "--standalone --nproc-per-node 4 -m hvd_deepreduce advise MODEL --measure",
            ExitCode.USAGE,
        )
    per_host = per_host or 1
    if rank_count is None or (bandwidth is None and collectives is None):
        output.fail("give --ranks and --bandwidth, or --measure under mpirun or torchrun", ExitCode.USAGE)
    if rank_count % per_host:
        output.fail(
            f"--ranks is {rank_count} and --per-host is {per_host}; each host must have equally many ranks",
            ExitCode.USAGE,
        )
    own = rank_cores or cores.of_rank(1) / per_host
    computing = threads or max(1, int(own))
    sharing = max(1.0, computing / own)
    if collectives is not None:
        link = speeds.link(collectives, sharing)
    if bandwidth is not None:
        link = prediction.Link(number(bandwidth, "--bandwidth"), 1e-6 * latency, speeds.stack())
    job = prediction.Job(
        sizes, rank_count, per_host, 1e-3 * compute, free_core=own >= computing + 1, sharing=sharing,
        tensor_overhead=1e-6 * tensor_overhead,
    )  # fmt: skip

    found = advise_job(
        job, link, configs, captured=vectors, collectives=collectives,
        dense_step=None if dense_step is None else 1e-3 * dense_step,
    )  # fmt: skip
    if collectives is None or collectives.rank == 0:
        show(found, as_json)
    if collectives is not None:
        collectives.close()


def show(found: Advice, as_json: bool) -> None:
    """Prints advice."""
    if as_json:
        output.print_json(found.to_dict())
        return
    dense = found.named(prediction.DENSE).seconds
    rows: list[tuple[Any, ...]] = []
    for one in found.predictions:
        kind = f"updates / {one.every}" if one.updates else "gradients" * (one.name != prediction.LOCAL)
        speed = f"{dense / one.seconds:.2f}" if one.seconds else ""
        rows.append(
            (one.name, kind, f"{1e3 * one.seconds:.1f}", speed, f"{1e3 * one.codec:.1f}", f"{1e3 * one.link:.1f}",
             f"{one.received / 1e6:.2f}")
        )  # fmt: skip
    head = ("way", "exchanges", "ms a step", "dense / this", "ms codec", "ms link", "MB in")
    output.table(head, rows, f"{found.job.numel:,} parameters, {found.job.ranks} ranks: predicted steps", left=2)
    for name, why in found.left_out.items():
        output.say(f"{name} is left out: {why}.")
    output.say()
    output.say(" ".join(found.sentences()))
    output.say()
    output.say("Assumed:")
    for sentence in found.assumptions():
        output.say(f"- {sentence}")
