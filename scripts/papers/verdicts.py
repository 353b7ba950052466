"""The comparison with the papers' tables and figures in docs/papers.md: each verdict is computed from the results.

    python scripts/papers/verdicts.py             # writes the tables
    python scripts/papers/verdicts.py --check     # says whether they are what the results give

scripts/papers/claims.yaml has what the papers say, and how our numbers are read.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("dev", "train", "papers", "arena"))

import doc_sections
import typer
import yaml
from figure_kit import depth

DOCS = doc_sections.ROOT / "docs"
CLAIMS: dict[str, list[dict[str, Any]]] = yaml.safe_load(Path(__file__).with_name("claims.yaml").read_text())
EPOCH = "s an epoch, computing + network"
ERROR = "test error at the end (of the seeds)"
Tables = Sequence[Mapping[str, Any]]
Runs = Sequence[Mapping[str, Any]]


class Open(Exception):
    """A claim that cannot be judged yet, and why."""


# --- What an expression can call


def cell(tables: Tables, name: str, column: str, second: str = "", nth: int = 0) -> float:
    """A number of the first table: the n-th of a cell. ``second``: what the row has in one of its other cells."""
    head, rows = tables[0]["head"], tables[0]["rows"]
    text = next(
        row[head.index(column)]
        for row in rows
        if name in (one := [part.replace("`", "") for part in row]) and second in ("", *one)
    )
    numbers = re.findall(r"-?\d+\.?\d*", text.replace(",", ""))
    if len(numbers) <= nth:
        raise Open(f"the results have {text!r} for {name}")
    return float(numbers[nth])


def counted(tables: Tables, name: str, every: str, target: str = "loss") -> float:
    """Mbit until a target, as Qsparse-local-SGD counts them. Each message has as many bits, so there are as many more
    until the test error as steps."""
    bits = cell(tables, name, "as the paper counts", every)
    if target == "loss":
        return bits
    to_loss, to_error = (
        next(column for column in tables[0]["head"] if column.startswith(f"steps to {words}"))
        for words in ("loss", "test error")
    )
    return bits * cell(tables, name, to_error, every) / cell(tables, name, to_loss, every)


def epoch(tables: Tables, name: str) -> float:
    """Seconds of an epoch, computing and network."""
    return cell(tables, name, EPOCH) + cell(tables, name, EPOCH, nth=1)


def volume(runs: Runs) -> float:
    return mean(run["volume"] for run in runs)


def accuracy(runs: Runs) -> float:
    """In hundredths, after the last epoch."""
    return mean(100 * run["accuracy"][-1] for run in runs)


def hits(runs: Runs) -> list[float]:
    """The best hit rate of each run."""
    return [max(run["hit_rate"]) for run in runs]


def gaps(runs: Runs, others: Runs, key: str) -> list[float]:
    """What two methods' runs differ by at the end, for each seed."""
    return [one[key][-1] - other[key][-1] for one, other in zip(runs, others, strict=True)]


def loss(panels: Mapping[str, Mapping[str, Any]], name: str) -> float:
    """The lowest loss of a run of a panel."""
    return min(next(runs[name]["loss"] for runs in panels.values() if name in runs))


def deeper(runs: Runs) -> list[float]:
    """How much deeper what is sent lies in the last epoch than in the first, of each seed."""
    return [depth(run["kept"][-1]) - depth(run["kept"][0]) for run in runs]


def span(values: Iterable[float]) -> float:
    found = list(values)
    return max(found) - min(found)


def size(data: Mapping[str, Any], name: str) -> float:
    """The bytes of the first of the combinations whose name begins so."""
    row = next(row for one, row in data["rows"].items() if one.startswith(name) and not one.startswith("ours"))
    return sum(row[key] for key in ("index", "value", "order", "header"))


def published(data: Mapping[str, Any], but: str) -> list[float]:
    """The bytes of the published combinations whose names do not begin so."""
    return [size(data, name) for name in data["rows"] if not name.startswith(("ours", but))]


def seconds(row: Mapping[str, float]) -> float:
    return row["encode"] + row["decode"]


def step(data: Mapping[str, Any], method: str, speed: str, *parts: str) -> float:
    """The seconds of a step, or of some of its parts."""
    (bar,) = (one for one in data["bars"] if (one["method"], one["speed"]) == (method, speed))
    return sum(bar.get(part, 0.0) for part in parts or ("computing", "coding", "network", "waiting"))


FUNCTIONS = {
    one.__name__: one for one in (
        cell, counted, epoch, volume, accuracy, hits, gaps, deeper, loss, span, size, published, seconds, step, mean,
    )
}  # fmt: skip
SEEDS = 3
"""Of the figures that have several, the most."""
CONSTANTS = {"EPOCH": EPOCH, "ERROR": ERROR, "RATES": ("0.0001", "0.001", "0.01", "0.1")}


def without(data: Any, seed: int) -> Any:
    """The data of a figure without the trainings of one of its seeds."""
    if isinstance(data, dict):
        return {key: without(value, seed) for key, value in data.items()}
    if isinstance(data, list) and len(data) > 1 and all(isinstance(one, dict) and "parameters" in one for one in data):
        return [one for at, one in enumerate(data) if at != seed]
    return data


def joined(numbers: Sequence[float], form: str, between: str = ", ") -> str:
    """Numbers as text."""
    return between.join(f"{one:{form}}" for one in numbers)


class Results:
    """What was measured.

    Args:
        docs: the folder of the documents.
        left_out: a seed whose trainings are left out.
    """

    def __init__(self, docs: Path = DOCS, left_out: int | None = None) -> None:
        self.docs, self.left_out = docs, left_out

    def page(self, page: str, section: str) -> Tables:
        """The tables of a section that a script has written."""
        return self.read(doc_sections.tables(doc_sections.read(self.docs / page, section)))

    def read(self, data: Any) -> Any:
        """Tests change what is read."""
        return data if self.left_out is None else without(data, self.left_out)

    @cached_property
    def less(self) -> list[Results]:
        """The results without each of the seeds of figures; those of the arena are these."""
        found = [Results(self.docs, seed) for seed in range(SEEDS)]
        for one in found:
            one.arena = self.arena
        return found

    @cached_property
    def arena(self) -> dict[str, Any]:
        """The finished methods of DeepReduce's contests; none while there are no trainings."""
        names = ("deepreduce-resnet", "deepreduce-densenet")
        there = [name for name in names if (self.docs / "results" / "arena" / f"{name}.jsonl").exists()]
        if not there:
            return {}
        from arena import done

        return {name: done(name) for name in there}

    def trained_volume(self, name: str) -> float:
        """The container's size relative to dense, of a method of the arena."""
        found = self.arena.get("deepreduce-resnet", {})
        if name not in found:
            raise Open("being trained again to convergence")
        return float(self.read(found[name].runs[0]["volume"]))

    def value(self, expression: Any, x: Any = None) -> Any:
        """What an expression gives; a number gives itself."""
        if not isinstance(expression, str):
            return expression
        names: dict[str, Any] = {**FUNCTIONS, **CONSTANTS, "page": self.page, "x": x}
        names["trained_volume"] = self.trained_volume
        for word in set(re.findall(r"\b[a-z]\w+\b", expression)) - set(names):
            path = self.docs / "results" / "figures" / f"{word}.json"
            if path.exists():
                names[word] = self.read(json.loads(path.read_text())["data"])
        if "emulated" in expression:
            found = doc_sections.tables((self.docs / "densestream.md").read_text())
            names["emulated"] = self.read([one for one in found if one["heading"] == "The emulated network"])
        return eval(expression, names)  # of our own file

    def verdict(self, claim: Mapping[str, Any]) -> str:
        """Yes or No, with what was measured, and what it was compared with."""
        if "open" in claim:
            return f"open: {claim['open']}"
        form = claim.get("form", ".3g")
        try:
            holds, found, said = self.judged(claim)
        except Open as why:
            return f"open: {why}"
        if any(one.judged(claim)[0] != holds for one in self.less):
            return f"**Not decided**: {joined(found, form)} ({'; '.join(said)}; otherwise without one of the seeds)"
        parts = [joined([one], form) for one in found]
        verdict, shown = "Yes" if all(holds) else "**No**", ", ".join(parts)
        if any(holds) and not all(holds):
            verdict = f"**No** for {holds.count(False)} of {len(holds)}"
            shown = ", ".join(part if one else f"**{part}**" for part, one in zip(parts, holds, strict=True))
        if "seeds" in claim:
            each = self.value(claim["seeds"])
            said.append(f"{len(each)} seeds: {joined([min(each), max(each)], form, ' to ')}")
        for words, (expression, other) in claim.get("beside", {}).items():
            more = self.value(expression)
            said.append(f"{words} {joined(more if isinstance(more, list) else [more], other)}")
        return f"{verdict}: {shown} ({'; '.join(said)})"

    def judged(self, claim: Mapping[str, Any]) -> tuple[list[bool], list[float], list[str]]:
        """Of each number of a claim, whether it is within the bounds; the numbers; and what the bounds are."""
        form = claim.get("form", ".3g")
        ours = [self.value(claim["ours"], x) for x in claim["each"]] if "each" in claim else self.value(claim["ours"])
        found = ours if isinstance(ours, list) else [ours]
        if "near" in claim:
            near = claim["near"] if isinstance(claim["near"], list) else [claim["near"]] * len(found)
            within = claim.get("within", 0.1)
            holds = [abs(mine / theirs - 1) <= within for mine, theirs in zip(found, near, strict=True)]
            printed = near if isinstance(claim["near"], list) else near[:1]
            return holds, found, [f"published {joined(printed, form)} ± {within:.0%}"]
        most, least = (self.value(claim.get(*one)) for one in (("most", math.inf), ("least", -math.inf)))
        said = [f"at most {joined([most], form)}"] * (most < math.inf)
        said += [f"at least {joined([least], form)}"] * (least > -math.inf)
        return [least <= one <= most for one in found], found, said

    def of_the_arena(self, contest: str, source: str) -> Iterable[tuple[str, str]]:
        """What is said in the arena's claims of a source, and their verdicts there."""
        import page
        from contests import CONTESTS

        given, found = CONTESTS[contest], self.arena.get(contest, {})
        for claim in given.claims:
            if claim.source.startswith(source):
                done = claim.method in found and claim.reference in found
                short = "fails" if claim.least > -math.inf else "reaches the baseline"
                words = f"{given.methods[claim.method].words}: {claim.source.partition(': ')[2] or short}"
                yield (
                    words,
                    page.verdict(given, found, claim)[2:] if done else "open: being trained again to convergence",
                )


def link(page: str, title: str) -> str:
    """A link to a section."""
    anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
    return f"[{title}]({page}#{anchor})"


def table(rows: Iterable[Mapping[str, Any]], results: Results) -> str:
    """A line for each claim."""
    lines = []
    for row in rows:
        see = row.get("see", ())
        here = ", ".join(link(*one) for one in zip(see[::2], see[1::2], strict=True)) or "none"
        judged = [(claim["says"], results.verdict(claim)) for claim in row.get("claims", ())]
        judged[:0] = results.of_the_arena(*row["arena"]) if "arena" in row else ()
        first = [row["paper"], f"{here}. {row['differs']}"]
        for says, verdict in judged or [("", "not judged")]:
            lines.append([first[0], says, verdict, first[1]])
            first = ["", ""]
    return doc_sections.table(["paper", "what it says", "agrees?", "here, and what differs"], lines)


def written(text: str, results: Results) -> str:
    """docs/papers.md with the tables that the results give."""
    for paper, rows in CLAIMS.items():
        begin, end = (f"<!-- {part} verdicts: {paper} -->" for part in ("begin", "end"))
        if begin not in text or end not in text:
            raise ValueError(f"docs/papers.md has no table of {paper}: write {begin} and {end} into it, a line each")
        text = f"{text[: text.index(begin)]}{begin}\n{table(rows, results)}\n{text[text.index(end) :]}"
    return text


def main(check: Annotated[bool, typer.Option("--check", help="compare, and write nothing")] = False) -> None:
    """Writes the tables of docs/papers.md."""
    page = DOCS / "papers.md"
    old, new = page.read_text(), written(page.read_text(), Results())
    if not check:
        page.write_text(new)
    elif new != old:
        raise SystemExit("docs/papers.md is out of date: run python scripts/papers/verdicts.py")


if __name__ == "__main__":
    typer.run(main)
