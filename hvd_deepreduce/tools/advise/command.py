"""``hvd-deepreduce advise``: predicts the step times of dense gradients and of presets, and says which to take."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hvd_deepreduce import Config
from hvd_deepreduce.engine import cores
from hvd_deepreduce.exchange.costs import Link
from hvd_deepreduce.tools import gradient_file, gradients, output, quantities, ranks
from hvd_deepreduce.tools.advise import losses, prediction, speeds
from hvd_deepreduce.tools.advise.report import Advice
from hvd_deepreduce.tools.advise.report import advise as advise_job
from hvd_deepreduce.tools.output import misused

EXAMPLES = (
    "advise 25.6M --ranks 4 --bandwidth 1G --compute 100 --optimizer sgd",
    "advise gradients.npz --ranks 16 --per-host 4 --bandwidth 10G --dense-step 400 --optimizer adamw --json",
    "mpirun -np 4 hvd-deepreduce advise 25.6M --measure --compute 100 --optimizer adamw",
)
TENSOR, MOST_TENSORS = 160_000, 1000
LATENCY = 50.0
"""Microseconds of a message over TCP, unless given."""


def sizes_of(model: str) -> list[int]:
    """Elements of the tensors of a model, from its number of elements or from those of all tensors.

    The former is divided into equal tensors of about ``TENSOR``, as large as ResNet-50's are.
    """
    sizes = [round(quantities.count(part, "MODEL")) for part in model.split(",")]
    if len(sizes) == 1:
        whole, count = sizes[0], min(MOST_TENSORS, max(1, sizes[0] // TENSOR))
        sizes = [whole // count + (place < whole % count) for place in range(count)]
    if min(sizes) < 1:
        misused(f"MODEL is {model!r}; a tensor has 1 element or more")
    return sizes


def vectors_of(file: Path, most: int) -> tuple[list[int], Callable[[Config], Sequence[gradient_file.Vector]]]:
    """Elements of the tensors in a file of gradients, and what a config selects from: the accumulator with error
    feedback, if the file has one, and otherwise the gradient."""
    given = gradients.usable(gradients.load(file, most=most))
    raw = given
    try:
        raw = gradients.load(file, "gradient", most=most)
    except (gradients.GradientError, gradient_file.CaptureError):
        pass  # it has one vector alone
    return given.sizes, lambda config: [(given if config.error_feedback else raw).vector]


def advise(
    model: Annotated[
        str,
        typer.Argument(
            help="The number of parameters (25.6M, 7B), the sizes of all tensors (64,4096,1M), or a file of gradients "
            "(.npz, .npy, .pt)."
        ),
    ],
    optimizer: Annotated[
        str | None,
        typer.Option(
            help="Of the job: sgd, adam, adamw, muon, lamb, ... What a preset loses depends on it. Asked for on a "
            "terminal; elsewhere, without it, there is an answer for SGD and one for Adam and its relatives."
        ),
    ] = None,
    rank_count: Annotated[int | None, typer.Option("--ranks", help="Ranks in all, 2 or more.")] = None,
    per_host: Annotated[
        int | None, typer.Option("--per-host", min=1, help="Ranks on each host, which share its link. Default: 1.")
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help="Of a host's link, in each direction, in bits: 1G, 100Mbit/s; in bytes: 1GB/s.")
    ] = None,
    latency: Annotated[
        float | None, typer.Option(min=0, help=f"Microseconds of a message. Default: {LATENCY:g}.")
    ] = None,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Measure the link between the ranks of this mpirun or torchrun."),
    ] = False,
    compute: Annotated[
        float | None, typer.Option(min=0, help="Milliseconds of a step on one rank, without any exchange.")
    ] = None,
    dense_step: Annotated[
        float | None, typer.Option(min=0, help="Measured milliseconds of a dense step, in place of --compute.")
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            help="A preset's name or a YAML file; can be repeated. Default: some of each kind. Presets that "
            "lose more than others (docs/advise.md) are recommended only if they are named here."
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
    most_elements: output.MostElements = gradient_file.MOST,
    as_json: output.Json = False,
) -> None:
    """Predicts the time of a training step, dense and under presets, and says which to take."""
    with output.errors_as_sentences():
        if model.lower().endswith(gradients.SUFFIXES):
            sizes, vectors = vectors_of(Path(model), most_elements)
        else:
            sizes, vectors = sizes_of(model), None
        configs = [(name, Config.load(name)) for name in config] if config else None
    times = {"--compute": compute, "--dense-step": dense_step, "--latency": latency, "--cores": rank_cores}
    for name, value in {**times, "--tensor-overhead": tensor_overhead}.items():
        if value is not None and not math.isfinite(value):
            misused(f"{name} is {value}; it must be finite")
    if measure and (bandwidth is not None or latency is not None):
        given = "--bandwidth" if bandwidth is not None else "--latency"
        misused(f"--measure measures the link, and {given} says what it is: give one of them")
    if compute is not None and dense_step is not None:
        misused("--compute and --dense-step are both given; the time of computing is found from a dense step: give one")
    try:
        losses.families_of(optimizer)
    except ValueError as error:
        misused(str(error))
    rate = quantities.bits_per_second(bandwidth, "--bandwidth") if bandwidth is not None else None
    collectives = ranks.of_launcher() if measure else None
    if collectives is not None:
        rank_count, here = rank_count or collectives.ranks, collectives.on_this_host()
        per_host = per_host or here
        if here == collectives.ranks and rank_count > per_host:
            misused(
                f"--measure was started on one host, and a job of {rank_count} ranks has {rank_count // per_host}: it "
                "would measure this host's memory, and not the link between hosts. Start the ranks on two hosts or "
                "more, or give --bandwidth"
            )
    elif measure:
        misused(
            "--measure needs the ranks of a job: run mpirun -np 4 hvd-deepreduce advise MODEL --measure, or torchrun "
            "--standalone --nproc-per-node 4 -m hvd_deepreduce advise MODEL --measure"
        )
    per_host = per_host or 1
    if rank_count is None or (bandwidth is None and collectives is None):
        misused("give --ranks and --bandwidth, or --measure under mpirun or torchrun")
    if rank_count < 2:
        misused(f"--ranks is {rank_count}; it must be 2 or more, since a single rank exchanges nothing")
    if per_host > rank_count:
        misused(f"--per-host is {per_host} and --ranks is {rank_count}: a host cannot have more ranks than the job")
    if rank_count % per_host:
        misused(f"--ranks is {rank_count} and --per-host is {per_host}; each host must have equally many ranks")
    if optimizer is None and not (as_json or measure):
        optimizer = asked_for()

    own = rank_cores or cores.share(per_host)
    computing = threads or max(1, int(own))
    sharing = max(1.0, computing / own)
    if rate is not None:
        link = Link(rate, 1e-6 * (LATENCY if latency is None else latency), speeds.stack())
    else:
        assert collectives is not None
        link = speeds.link(collectives, sharing)
    job = prediction.Job(
        sizes, rank_count, per_host, 1e-3 * (compute or 0.0), free_core=own >= computing + 1, sharing=sharing,
        tensor_overhead=1e-6 * tensor_overhead,
    )  # fmt: skip

    found = advise_job(
        job, link, configs, optimizer=optimizer, captured=vectors, collectives=collectives,
        dense_step=None if dense_step is None else 1e-3 * dense_step,
    )  # fmt: skip
    if collectives is None or collectives.rank == 0:
        show(found, as_json)
    if collectives is not None:
        collectives.close()


def asked_for() -> str | None:
    """The optimizer that a user at a terminal names; None: no terminal, or no answer."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return None
    while True:
        try:
            answer = input("Which optimizer has the job (sgd, adam, adamw, muon, ...)? ").strip()
        except EOFError:
            output.say()
            return None
        if not answer:
            return None
        try:
            losses.families_of(answer)
        except ValueError as error:
            output.paragraph(f"{error}.")
        else:
            return answer


def show(found: Advice, as_json: bool) -> None:
    """Prints advice."""
    if as_json:
        output.print_json(found.to_dict())
        return
    dense = found.named(prediction.DENSE).seconds
    rows: list[tuple[Any, ...]] = []
    for one in found.predictions:
        kind = f"updates/{one.every}" if one.updates else "gradients" * (one.name != prediction.LOCAL)
        speed = f"{dense / one.seconds:.2f}" if one.seconds else ""
        cells = (short(value) for value in (1e3 * one.seconds, 1e3 * one.codec, 1e3 * one.link, one.received / 1e6))
        rows.append((one.name, kind, speed, *cells))
    head = ("way", "exchanges", "faster", "ms a step", "codec", "link", "MB in")
    output.table(head, rows, f"{found.job.numel:,} parameters, {found.job.ranks} ranks: predicted steps", left=2)
    about = "faster: dense's time over this one's. codec, link: the milliseconds that they would take alone."
    if any(one.updates for one in found.predictions):
        about += " updates/4: LocalSGD, which exchanges every 4 steps; times and bytes are the mean of its steps."
    output.paragraph(about)
    for name, why in found.left_out.items():
        output.paragraph(f"{name} is left out: {why}.")
    for family in found.families:
        show_losses(found, family)
    output.say()
    for sentence in found.sentences():
        output.paragraph(sentence)
    output.say()
    output.say("Assumed:")
    for sentence in found.assumptions():
        output.paragraph(f"- {sentence}")


def show_losses(found: Advice, family: str) -> None:
    """Prints what the presets lost under a family of optimizers, on the small jobs of the documents."""
    jobs = losses.jobs_of(family)
    rows = []
    for name in (one.name for one in found.predictions):
        lost = [losses.lost(key, name) for key in jobs]
        if any(value is not None for value in lost):
            rows.append((name, *("" if value is None else f"{value:+.2f}" for value in lost)))
    if rows:
        output.say()
        kind = "SGD" if family == losses.SGD else "Adam or AdamW"
        head = ("way", *(f"{job.name}, {job.unit}" for job in jobs.values()))
        title = (
            f"Lost under {kind}, on small jobs (docs/results/presets.md, docs/results/arena.md); negative: better "
            "than dense"
        )
        output.table(head, rows, title, left=1)


def short(value: float) -> str:
    """Three digits, and all before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
