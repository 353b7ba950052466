"""Measures what each preset sends on 2 and 4 ranks, relative to the dense ring, and writes docs/results/benchmarks.md.

    python scripts/bench/wire_ratios.py --gradient data/captured/resnet50_0.01.npz

The file is one of scripts/bench/capture_gradients.py, with as many ranks as the largest job. Each job is a real one
under mpirun. A preset with error feedback gets the rank's accumulator as its gradient, with residuals of zero, and so
selects what the captured job would have selected; others get the raw gradient. The figures are those of
`stats()["last_step"]` of the second step, of the rank that sends most. For more ranks, an allgather's bytes are
computed (``computed``).
"""

import json
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Annotated, Any

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("dev", "train"))

import doc_sections
import numpy as np
import typer
from doc_sections import RESULTS, ROOT
from history import mpirun

DOC = RESULTS / "benchmarks.md"
PRESETS = (
    "recommended,fast,smallest,densestream,densestream_model,signtopk,topk_raw,dr_bf_p0,qsgd,natural,terngrad,"
    "adamw_small,diloco"
)
FACTS = ("network", "config", "density", "steps", "ranks")
TEXT = """\
Bytes that a rank sends in a step, relative to a dense allreduce by a ring on as many ranks, which sends 2 (n - 1) / n
times the {dense:,} bytes of the gradient. Everything is counted that `stats()` counts: containers, carriers,
gradients that are too small to be compressed, and the meeting. An allgather brings every container to every rank, so
its ratio grows with n / 2, and from some number of ranks on it sends more than dense.

{table}

The input is captured ({made}): accumulators for presets with error feedback, raw gradients for those without. The
density is that of the preset, whatever the captured job's was. Presets of LocalSGD get accumulators as their updates,
and their bytes are divided by the local steps between two exchanges. The jobs on {run} ranks were run; for {more} ranks
the bytes are computed, for allgathers alone. These are bytes and not times.

*{today}, scripts/bench/wire_ratios.py.*"""


def measure(gradient: Path, presets: list[str], out: Path) -> None:
    """One rank's part: the bytes of each preset's last step, as JSON on rank 0."""
    import horovod.torch as hvd
    import torch
    from given import Given

    from hvd_deepreduce import Config
    from hvd_deepreduce.torch import DeepReduce, LocalSGD

    hvd.init()
    torch.set_num_threads(1)
    with np.load(gradient) as arrays:
        sizes = arrays["sizes"].tolist()
        given = {
            kind: torch.from_numpy(arrays[f"{kind}_{hvd.rank()}"]).split(sizes)
            for kind in ("accumulator", "gradient")
            if f"{kind}_{hvd.rank()}" in arrays.files
        }
    rows = {}
    for preset in presets:
        model, local = Given(sizes), Config.load(preset).local
        named, plain = model.named(preset), torch.optim.SGD(model.parameters(), lr=0.0 if local is None else 1.0)
        if local is None:
            counting: Any = DeepReduce(named, preset)
            optimizer = hvd.DistributedOptimizer(plain, named, counting)
            exchange, every = counting.config.exchange.name, 1
        else:
            # Its updates are the accumulators, in one fragment and without a delay: the same bytes, all at once.
            whole = {"every": 1, "fragments": 1, "delay": 0, "mix": None}
            counting = optimizer = LocalSGD(plain, named, preset, local={**local.model_dump(), **whole})
            exchange, every = f"allgather / {local.every}", local.every
        feedback = local is not None or counting.config.error_feedback
        for _ in range(2):
            state = counting.state_dict()
            (state if local is None else state["local_sgd"]["compression"])["residuals"] = {}
            counting.load_state_dict(state)
            optimizer.zero_grad()
            model(given["accumulator" if feedback else "gradient"]).backward()
            optimizer.step()
        stats = counting.stats()["last_step"]
        counting.close()
        sent = max(hvd.allgather_object(stats["bytes_sent"])) / every
        rows[preset] = {"sent": sent, "dense": stats["dense_bytes"], "exchange": exchange}
        if hvd.rank() == 0:
            print(f"{hvd.size()} ranks  {preset:20s} {sent:>12,.0f} bytes", flush=True)
    if hvd.rank() == 0:
        out.write_text(json.dumps(rows))


def run(ranks: int, gradient: Path, presets: str) -> dict[str, Any]:
    """The job on so many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        options = ("--gradient", gradient, "--presets", presets, "--measure", out)
        return mpirun(ranks, __file__, *options, out=out, environment={"PYTHONPATH": str(ROOT)})


def computed(few: int, sent_by_few: int, many: int, sent_by_many: int, ranks: int) -> float:
    """Bytes that a rank of an allgather sends, from those in a smaller and a larger job: of n ranks each sends its
    containers n - 1 times, and 2 (n - 1) / n of what goes through Horovod's allreduce."""

    def factors(n: int) -> tuple[float, float]:
        return n - 1, 2 * (n - 1) / n

    parts = np.linalg.solve([factors(few), factors(many)], [sent_by_few, sent_by_many])
    return float(parts @ factors(ranks))


def table(jobs: dict[int, dict[str, Any]], presets: list[str], more: list[int]) -> str:
    """Rows of presets, columns of ranks."""
    few, many = min(jobs), max(jobs)
    head, lines = ["preset", "exchange", *(f"{n} ranks" for n in [*jobs, *more])], []
    for preset in presets:
        cells = [f"{job[preset]['sent'] / job[preset]['dense']:.2%}" for job in jobs.values()]
        exchange, dense = jobs[few][preset]["exchange"], jobs[few][preset]["dense"] * few / (2 * (few - 1))
        for ranks in more:
            sent = computed(few, jobs[few][preset]["sent"], many, jobs[many][preset]["sent"], ranks)
            share = sent / (dense * 2 * (ranks - 1) / ranks)
            cells.append(f"{share:.2%}" if exchange.startswith("allgather") else "")
        lines.append([preset, exchange, *cells])
    return doc_sections.table(head, lines)


def main(
    gradient: Annotated[Path, typer.Option(help="a file of scripts/bench/capture_gradients.py")] = Path(
        "data/captured/resnet50_0.01.npz"
    ),
    presets: Annotated[str, typer.Option(help="comma-separated")] = PRESETS,
    ranks: Annotated[str, typer.Option(help="the jobs that are run, at least two, comma-separated")] = "2,4",
    more: Annotated[str, typer.Option(help="further numbers of ranks, computed for allgathers")] = "8,16,32,64",
    page: Annotated[Path, typer.Option(help="the document whose section `wire` is written")] = DOC,
    measure_to: Annotated[Path | None, typer.Option("--measure", hidden=True)] = None,
) -> None:
    """Writes the section `wire` of docs/results/benchmarks.md."""
    names = presets.split(",")
    if measure_to is not None:
        return measure(gradient, names, measure_to)
    with np.load(gradient) as arrays:
        there = sum(name.startswith("gradient_") for name in arrays.files)
        numel = int(arrays["sizes"].sum())
        facts = json.loads(str(arrays["about"])) if "about" in arrays.files else {}
    if max(map(int, ranks.split(","))) > there:
        raise typer.BadParameter(f"{gradient} has {there} ranks, and --ranks is {ranks}: capture more, or run fewer")
    jobs = {int(count): run(int(count), gradient, presets) for count in ranks.split(",")}
    body = TEXT.format(
        dense=4 * numel,
        table=table(jobs, names, [int(n) for n in more.split(",") if n]),
        made=", ".join(f"{key} {facts[key]}" for key in FACTS if key in facts) or gradient.name,
        run=", ".join(map(str, jobs)),
        more=more.replace(",", ", "),
        today=date.today(),
    )
    doc_sections.write(page, "wire", "Bytes by preset and number of ranks", body)


if __name__ == "__main__":
    typer.run(main)
