"""The test error at the end of whole trainings: Qsparse-local-SGD and what it was compared with (Figures 1c, 1d, 2c).

    python scripts/papers/qsparse_ends.py --write

The jobs and the methods are those of scripts/papers/qsparse_bits.py, whose trainings stop at their targets. Here they
do all steps. Each method has its best step size of the job's grid, by the error at the end on a seed that is not
reported; one at the edge of the grid has no figure.
"""

import math
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

sys.path.append(str(Path(__file__).parents[1] / "dev"))

import doc_sections
import figure_kit
import numpy as np
import typer
from local_problems import Problem
from qsparse_bits import DOC, SEEDS, TITLES, Method, Setting, make, of_the_paper, train
from rich.progress import track

TUNING_SEED = 100
LAST = 5
"""Evaluations at the end, whose mean counts: a single one has the chance of a few test images."""


class End(NamedTuple):
    """The end of a method's trainings.

    Attributes:
        rate: the best step size; None: it may be beyond the grid.
        errors: test errors of the seeds.
    """

    method: Method
    rate: float | None
    errors: list[float]


def error(problem: Problem, method: Method, setting: Setting, rate: float, seed: int) -> float:
    """Of the last evaluations of all steps; infinite if the training diverges."""
    curve = train(problem, method, replace(setting, loss=-math.inf, error=-math.inf), rate, seed)
    whole = curve and setting.steps - curve[-1].step < max(setting.look, method.every)
    return float(np.mean([point.error for point in curve[-LAST:]])) if whole else math.inf


def end(problem: Problem, method: Method, setting: Setting, seeds: int) -> End:
    """Trains with each step size on ``TUNING_SEED``, and with each seed at the best one."""
    tried = {rate: error(problem, method, setting, rate, TUNING_SEED) for rate in setting.rates}
    best = min(setting.rates, key=lambda rate: tried[rate])
    inside = best not in (setting.rates[0], setting.rates[-1])
    return End(method, best if inside else None, [error(problem, method, setting, best, n) for n in range(seeds)])


def compared() -> list[Method]:
    """The methods of the figures."""
    return [method for method in of_the_paper(0.01) if method.every in (1, 8) and not method.asynchronous]


def table(job: str, ends: Sequence[End]) -> str:
    """Markdown: the error with its range over the seeds, and points above SGD with H = 1."""
    first = next(one for one in ends if (one.method.name, one.method.every) == ("SGD", 1))
    rows = []
    for method, rate, errors in ends:
        cells = ["at the edge", "", ""]
        if rate is not None:
            above = 100 * (np.mean(errors) - np.mean(first.errors))
            spread = f"{np.mean(errors):.2%} ({min(errors):.2%} to {max(errors):.2%})"
            cells = [f"{rate:.3g}", spread, f"{above:+.2f}" if first.rate else ""]
        rows.append([method.name, str(method.every), *cells])
    head = [job, "H", "rate", "test error at the end (of the seeds)", "points above SGD, H = 1"]
    return doc_sections.table(head, rows, right=True)


def main(
    quick: Annotated[bool, typer.Option("--quick", help="few steps on small data, to try the script")] = False,
    write: Annotated[bool, typer.Option("--write", help="write the section of docs/results/schemes.md")] = False,
) -> None:
    """Trains with all methods, and prints the tables."""
    if write and quick:
        raise typer.BadParameter(f"--write is for all steps, of which {DOC.name} tells")
    tables = []
    with ProcessPoolExecutor(figure_kit.processes) as pool:
        for job in TITLES:
            problem, setting, _ = make(job, quick)
            ends = pool.map(partial(end, problem, setting=setting, seeds=1 if quick else SEEDS), compared())
            tables.append(table(TITLES[job], list(track(ends, job, len(compared())))))
    print("\n\n".join(tables))
    if write:
        dated = f"*{date.today()}, scripts/papers/qsparse_ends.py.*"
        section = doc_sections.refreshed(DOC, "qsparse-ends", tables, dated)
        doc_sections.write(DOC, "qsparse-ends", "Test error at the end", section)


if __name__ == "__main__":
    typer.run(main)
