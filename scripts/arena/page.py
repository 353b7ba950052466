"""The page of the arena: a section for each contest, computed from its trainings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import mean, stdev
from typing import TYPE_CHECKING

import doc_sections
import figure_kit
from contests import Claim, Contest
from scipy.stats import t as student

if TYPE_CHECKING:
    from arena import Campaign

WITHIN = 1.02
"""Bytes up to so many times a budget count as at the budget: a density is chosen before the containers are known."""
FORM = {"nats": "+.3f", "points": "+.2f"}
RESULT = {"nats": "loss", "points": "accuracy"}
PAGE = figure_kit.RESULTS / "arena.md"
OVERVIEW = figure_kit.RESULTS.parent / "which_preset.md"
README = figure_kit.ROOT / "README.md"
VOTES = "signs of scaled momentum, tuned"
UPDATES = "`adamw_safe`, updates every 4 steps"
OF_MOMENTUM = "the largest of momentum (`memory: dgc`), 4 bits"
FAST = "`fast`; `recommended` sends the same here"
LARGEST = "the largest gradients, 4 bits, density from a budget"
LOSSES = {
    "each-step-2": ("GPT, AdamW", {
        "signs 0.7%": VOTES, "signs 0.25%": f"{VOTES}, fewer",
        "demo signs 0.7%": "DeMo, its signs entropy coded, too", "demo signs 0.25%": "the same, fewer",
        "gradients": "`fast`, the largest 1% of gradients: the wrong preset under AdamW",
    }),
    "each-step-4": ("GPT, AdamW", {
        "signs 0.25%": VOTES, "sign_momentum": "`sign_momentum` as it is, in each step",
        "sign_momentum_small": "`sign_momentum_small` as it is, in each step",
        "adamw_safe": UPDATES, "adamw_small": "`adamw_small`, updates every 4 steps",
    }),
    "adamw-8": ("GPT, AdamW", {
        "signs 0.7%": VOTES, "sparseloco 1.6%": "SparseLoCo, its indices entropy coded",
    }),
    "adamw-16": ("GPT, AdamW", {
        "signs 0.7%": VOTES, "signs 0.7%, in phases": f"{VOTES}, by `exchange: reduce_scatter`",
    }),
    "muon-8": ("GPT, Muon", {
        "updates 0.8%": "signs of updates, every few steps", "sparseloco 1.6%": "SparseLoCo, its indices entropy coded",
    }),
    "sgd-lstm-4": ("LSTM, SGD with momentum", {
        "fast": FAST, "adamw_safe": UPDATES, "ours 1.9%": LARGEST, "ours 1.9%, velocity": OF_MOMENTUM,
        "dense, velocity": "dense, clipped as that is", "powersgd 4": "PowerSGD, rank 4",
    }),
    "sgd-digits-4": ("ResNet, SGD with momentum", {
        "fast": FAST, "ours 1.4%": LARGEST, "ours 1.4%, velocity": OF_MOMENTUM,
        "powersgd 4": "PowerSGD, rank 4",
    }),
}  # fmt: skip
"""Rows of the README: of which contests, words for the job, which methods, and words for these."""
ABOUT = """\
# The arena

Losses and bytes of published methods and of ours. `python scripts/arena/arena.py run` trains what is missing, and
`report` writes this page from the trainings in `docs/results/arena/`, a line each. All workers of a job run in one
process; there are no times.

Each method of a contest has the same number of trials for its own knobs: a coordinate descent on a grid, on seeds that
are not reported, with short trainings; some knobs, most often the learning rate alone, are then searched once more with
whole trainings. Searches and results are of the same data, which no method trains on. A method whose best setting is at
the edge of its grid has no row. A claim is not decided where the mean gap is nearer to the bound than it is certain,
on one side with a confidence of 95% by Student's t of the seeds; with one seed it never is. Some claims are judged once
more, with the same settings and other seeds.
`bytes / dense` is what the busiest worker sends, relative to a float32 ring in each step; in each of these exchanges a
worker receives as much, to the differences between containers. A gap is to the first row's result with the same seed,
in nats of loss or in points of accuracy, and positive where the method is worse; in brackets, the least and the
greatest of the seeds. Ours are in bold. A density is computed from its budget before a training: bytes up to 2% above a
budget are at it.

The jobs: `gpt` (0.61 M parameters; `gpt-large` 2.4 M) and `lstm` (0.36 M) read the source of Python's standard
library, by characters, in windows of 64, 4 of them a worker and step; the loss is on text that they have not seen.
`resnet` (38 thousand parameters) and `densenet` (60 thousand) see 4,000 digits of MNIST with 14 x 14 pixels, 16 a
worker and step; `digits`, a ResNet of 1.4 M, sees scikit-learn's 1,437, 4 a worker and step; the accuracy is on 1,000,
or 360, other digits. The learning rate has a warm-up and then a cosine. With 2 workers `gpt` reads its text 0.2 times,
and with 16 workers 1.8 times; in the last tenth of the steps dense's loss falls by 0.010 with 2 workers and by 0.006
with 8 (one seed), less than it spreads over the seeds. Longer trainings end lower: what a method loses, or gains, after
so many steps need not be what it does after many more. On another processor, whose matrix products round otherwise,
one of these trainings ended at 1.633 and not at 1.687, at a rate beside one that fails, where seeds differ most, too.

The budget of all contests was 40 hours of one core. They have taken {hours:.1f} so far; {retired:.1f} more went into
trainings that are not of these tables (`retired.jsonl`): grids have grown, knobs were added, and settings were searched
anew after a review.
"""


def about(hours: float, retired: float) -> str:
    """The page's beginning.

    Args:
        hours: of one core, of all trainings of the contests.
        retired: of those that no contest asks for any more.
    """
    return ABOUT.format(hours=hours, retired=retired)


def gaps(
    contest: Contest, found: Mapping[str, Campaign], name: str, reference: str, early: bool = False
) -> list[float]:
    """The score of each seed less that of the reference with the same seed."""
    both = zip(scores(contest, found[name], early), scores(contest, found[reference], early), strict=True)
    return [mine - theirs for mine, theirs in both]


def scores(contest: Contest, one: Campaign, early: bool = False) -> list[float]:
    """Of each seed, at the end or after a fifth of the steps."""
    return [contest.score(line["early"] if early else line) for line in one.runs]


def uncertainty(values: list[float]) -> float:
    """How far the mean may be off to one side, with a confidence of 95% by Student's t; infinite of one value."""
    count = len(values)
    return float(student.ppf(0.95, count - 1)) * stdev(values) / math.sqrt(count) if count > 1 else math.inf


def share(one: Campaign) -> float:
    """Bytes relative to dense, the mean over the seeds."""
    return mean(line["share"] for line in one.runs)


def span(values: list[float], form: str) -> str:
    """A mean, with the least and the greatest value."""
    return f"{mean(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def result(contest: Contest, one: Campaign) -> str:
    """The mean loss or accuracy of the seeds."""
    score = mean(scores(contest, one))
    return f"{100 - score:.2f}%" if contest.unit == "points" else f"{score:.4f}"


def table(contest: Contest, found: Mapping[str, Campaign]) -> str:
    """A row for each method whose optimum is inside its grid."""
    reference, rows = contest.reference, []
    for name, method in contest.methods.items():
        if name not in found or found[name].at_edge:
            continue
        one = found[name]
        gap = gaps(contest, found, name, reference) if reference in found else []
        volume = one.runs[0].get("volume")
        sent = f"{share(one):.3%}"
        if method.published_bits:
            published = method.published_share(one.runs[0]["settings"], contest.workers)
            sent += f" ({published:.3%} with {method.published_bits} bits an element, as published)"
        rows.append([
            method.words, sent, volume and f"{volume:.3%}", result(contest, one),
            span(gap, FORM[contest.unit]) if gap else "",
            ", ".join(f"{knob.rpartition('.')[2]} {value:g}" for knob, value in one.best.items()),
        ])  # fmt: skip
    head = ["what is sent", "bytes / dense", "container / dense", RESULT[contest.unit], "gap", "tuned"]
    if not any(row[2] for row in rows):
        head, rows = [head[:2] + head[3:], [row[:2] + row[3:] for row in rows]]
    return doc_sections.table(head, rows)


def verdict(
    contest: Contest, found: Mapping[str, Campaign], claim: Claim, repeated: Mapping[str, Campaign] | None = None
) -> str:
    """Whether a claim holds: a sentence with what was measured, the tolerance, and the spread of the reference.

    Args:
        repeated: the methods with other seeds; none: it was not repeated.
    """
    form, unit = FORM[contest.unit], contest.unit
    against = f"_{contest.methods[claim.reference].words.replace('*', '')}_"
    if claim.most < math.inf:
        bound = f"at most {claim.most:{form}} {unit} from {against}"
    else:
        bound = f"at least {claim.least:{form}} {unit} from {against}"
    said = f"{contest.methods[claim.method].words}: {bound}"
    if claim.share < 1:
        said += f", at {claim.share:.2%} of the bytes or less"
    if claim.source:
        said += f" ({claim.source})"
    absent = [name for name in (claim.method, claim.reference) if name not in found or found[name].at_edge]
    if absent:
        return f"- Open. {said}. Not tuned to the end: {', '.join(absent)}."
    word, own, sent = judged(contest, found, claim)
    theirs = scores(contest, found[claim.reference], claim.early)
    certain = f"certain within {uncertainty(own):{form[1:]}}" if len(own) > 1 else "one seed"
    when = " after a fifth of the steps" * claim.early
    said = (
        f"- **{word}.** {said}. Measured{when}: {span(own, form)} at {sent:.3%}, {certain}; {against} itself "
        f"spreads over {max(theirs) - min(theirs):{form[1:]}} between the seeds."
    )
    if repeated and {claim.method, claim.reference} <= set(repeated):
        word, own, _ = judged(contest, repeated, claim)
        said += f" With {len(own)} other seeds: **{word}**, {span(own, form)}."
    return said


def judged(contest: Contest, found: Mapping[str, Campaign], claim: Claim) -> tuple[str, list[float], float]:
    """Whether a claim holds, the gaps of the seeds, and the bytes relative to dense."""
    own = gaps(contest, found, claim.method, claim.reference, claim.early)
    sent, middle, around = share(found[claim.method]), mean(own), uncertainty(own)
    if sent > claim.share * WITHIN:
        word = "No"
    elif any(abs(middle - one) < around for one in (claim.most, claim.least)):
        word = "Not decided"
    else:
        word = "Yes" if claim.least <= middle <= claim.most else "No"
    return word, own, sent


def refused(contest: Contest, found: Mapping[str, Campaign]) -> str | None:
    """Methods without a row, and why."""
    words = [
        f"{contest.methods[name].words} (best at the edge of {', '.join(one.at_edge)})"
        for name, one in found.items()
        if one.at_edge
    ]
    missing = [method.words for name, method in contest.methods.items() if name not in found]
    parts = [f"No row: {'; '.join(words)}."] if words else []
    parts += [f"Not trained to the end: {'; '.join(missing)}."] if missing else []
    return " ".join(parts) or None


def picture(contest: Contest, found: Mapping[str, Campaign], name: str) -> str:
    """Plots the gaps against the bytes, and returns the picture's link."""
    reference = contest.reference
    figure, axes = figure_kit.picture(width=9, height=4.2)
    for number, (method, one) in enumerate(found.items()):
        if one.at_edge:
            continue
        own, color = gaps(contest, found, method, reference), figure_kit.COLORS[number % len(figure_kit.COLORS)]
        label = contest.methods[method].words.replace("*", "").replace("`", "")
        marker = figure_kit.MARKERS[(number + number // len(figure_kit.COLORS)) % len(figure_kit.MARKERS)]
        axes.plot([100 * share(one)] * len(own), own, marker, color=color, label=label, alpha=0.8)
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set(xscale="log", xlabel="bytes that a worker sends, % of a dense float32 ring in every step",
             ylabel=f"worse than {reference}, {contest.unit}", title=contest.title)  # fmt: skip
    linear = 0.1 if contest.unit == "nats" else 1.0
    if max(map(abs, axes.get_ylim())) > linear:
        axes.set_yscale("symlog", linthresh=linear, subs=(2, 5))
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.autoscale()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_major_formatter("{x:g}")
    figure.legend(fontsize=8, frameon=False, loc="outside right center")
    path = figure_kit.FOLDER / f"arena_{name}.png"
    figure_kit.save(figure, path)
    return f"![{contest.title}: loss against bytes](figures/{path.name})"


def body(
    name: str, contest: Contest, found: Mapping[str, Campaign], hours: float,
    repeated: Mapping[str, Campaign] | None = None,
) -> str:
    """The section of a contest, which has taken so many hours of a core. ``repeated``: as for ``verdict``."""
    seeds = "one seed" if len(contest.seeds) == 1 else f"{len(contest.seeds)} seeds"
    tuned = {knob for method in contest.methods.values() for knob in method.knobs}
    knobs = " and ".join(dict.fromkeys(knob.rpartition(".")[2] for knob in contest.again if knob in tuned))
    if contest.settings_of:
        searched = f" of {knobs}; other settings are those of `{contest.settings_of}`"
    else:
        count = len(contest.tuning_seeds)
        each = f", each with {count} seeds, of which the mean counts" if count > 1 else ""
        searched = f", and at most as many whole trainings search {knobs} once more{each}"
    container = (
        "`container / dense` is the size of a worker's container, the mean over the rounds, relative to float32."
    )
    about = (
        f"The job `{contest.job}` with {contest.workers} workers, {contest.steps:,} steps, {seeds}; the trials have "
        f"{contest.short:,} steps, {contest.trials} for each method{searched}. All of its "
        f"trainings so far have taken {hours:.1f} hours of one core."
        + (f" {container}" if contest.unit == "points" else "")
        + (f" {contest.note}" if contest.note else "")
    )
    parts = [about, picture(contest, found, name) if contest.reference in found and len(found) > 1 else None]
    parts += [table(contest, found), refused(contest, found)]
    parts.append("\n".join(verdict(contest, found, claim, repeated) for claim in contest.claims) or None)
    return "\n\n".join(part for part in parts if part)


def gap_of(contest: Contest, found: Mapping[str, Campaign], name: str, digits: int) -> str:
    """The mean gap to the contest's reference, and its uncertainty if there are several seeds; empty for itself."""
    if name == contest.reference:
        return ""
    own = gaps(contest, found, name, contest.reference)
    around = f" ± {uncertainty(own):.{digits}f}" if len(own) > 1 else ""
    return f"{mean(own):+.{digits}f}{around}"


def losses(contests: Mapping[str, Contest], found: Mapping[str, Mapping[str, Campaign]]) -> str:
    """The README's table: rows of ``LOSSES``, as far as they are through."""
    rows = []
    for name, (job, methods) in LOSSES.items():
        contest, through = contests[name], found[name]
        for method, words in methods.items():
            if {method, contest.reference} <= set(through) and not through[method].at_edge:
                gap = f"{gap_of(contest, through, method, 2)} {contest.unit}"
                rows.append([job, contest.workers, words, f"{share(through[method]):.2%}", gap])
    return doc_sections.table(["job", "ranks", "what is sent", "bytes / dense", "worse than dense"], rows)


def overview(contests: Mapping[str, Contest], found: Mapping[str, Mapping[str, Campaign]]) -> str:
    """A row for each method of several contests that have dense, as far as that is through."""
    rows = []
    for name, contest in contests.items():
        if contest.reference != "dense" or contest.reference not in found[name] or contest.repeats:
            continue
        for method, one in found[name].items():
            if not one.at_edge:
                gap = gap_of(contest, found[name], method, 3 if contest.unit == "nats" else 2)
                said = [contest.title, contest.methods[method].words, f"{share(one):.2%}", result(contest, one)]
                rows.append([*said, gap])
    return doc_sections.table(["contest", "what is sent", "bytes / dense", "loss or accuracy", "gap"], rows)


def write_overview(contests: Mapping[str, Contest], found: Mapping[str, Mapping[str, Campaign]]) -> None:
    """Writes the tables of the contests under AdamW and Muon, and under SGD, to docs/which_preset.md."""
    means = (
        "each method at the best of its settings that the arena found, of presets of the learning rate; means of the "
        "seeds "
        "([arena.md](results/arena.md) has the spreads and the settings). Gaps are to dense of the same contest, "
        "positive where a method is worse, with how far the mean may be off to one side (95%), in "
    )
    gpt = {name: one for name, one in contests.items() if one.job.startswith("gpt")}
    sgd = {name: one for name, one in contests.items() if name.startswith("sgd-")}
    words = f"A GPT of 0.6 M parameters where no other size is given, {means}nats."
    doc_sections.write(OVERVIEW, "arena", "Under AdamW, tuned", f"{words}\n\n{overview(gpt, found)}")
    words = f"In each step, or as presets of local steps do, {means}nats or points."
    doc_sections.write(OVERVIEW, "arena sgd", "Under SGD with momentum, tuned", f"{words}\n\n{overview(sgd, found)}")


def write_losses(contests: Mapping[str, Contest], found: Mapping[str, Mapping[str, Campaign]]) -> None:
    """Writes the README's table."""
    words = (
        "Each method has the best settings that a search found for it, dense as well; of presets only the learning "
        "rate was searched. The jobs are small: a GPT of 0.6 M parameters in 2,000 steps, an LSTM of 0.4 M, a ResNet "
        "of 1.4 M on digits. A loss is a cross-entropy in nats (natural logarithms); accuracy is in points of a "
        "percent. A negative number is better than dense; behind ±, how far the mean of 3 to 10 seeds may "
        "be off to one side, with a confidence of 95%. [docs/results/arena.md](docs/results/arena.md) has all methods, "
        "their settings, and what is claimed of them."
    )
    behind = (
        "Under DDP, untuned and after equal steps, dense, fp16 and PowerSGD of rank 4 reached a lower loss than "
        "`recommended`, and PowerSGD of rank 1 a higher one "
        "([docs/results/benchmarks.md](docs/results/benchmarks.md)). "
        "[docs/results/presets.md](docs/results/presets.md) has all presets on three jobs."
    )
    doc_sections.write(README, "arena", "What you lose", "\n\n".join([words, losses(contests, found), behind]))


def write(
    name: str, contest: Contest, found: Mapping[str, Campaign], hours: float,
    repeated: Mapping[str, Campaign] | None = None,
) -> None:
    """Writes the section of a contest, as ``body`` has it."""
    doc_sections.write(PAGE, name, contest.title, body(name, contest, found, hours, repeated))
