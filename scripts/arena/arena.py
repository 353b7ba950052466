"""The arena: jobs x methods x budgets, each method tuned with the same number of trials, and what is claimed of them.

    python scripts/arena/arena.py run                   # what is missing, on two cores; continues where it was stopped
    python scripts/arena/arena.py run each-step-2 --minutes 60
    python scripts/arena/arena.py plan                  # what is done, and what comes next
    python scripts/arena/arena.py prune                 # retires trainings that the contests no longer ask for
    python scripts/arena/arena.py report                # docs/results/arena.md, from the lines that are there

A training is a line of docs/results/arena/CONTEST.jsonl: job, workers, steps, seed, settings, and what came out. The
tables, pictures and verdicts of docs/results/arena.md are computed from these lines. Lines that a contest does not ask
for any more, as it has changed, are in retired.jsonl; with a reason, if the same training may end otherwise now. A
method whose optimum is at the edge of its grid has no row: its grid grows, or it gets more trials, as all methods of
its contest.
"""

import json
import sys
import time
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, NamedTuple

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("dev", "train", "papers"))

import page
import typer
from contests import CONTESTS, ONCE_MORE, Contest, loss_of
from figure_kit import RESULTS, json_lines
from trainer import train
from tuning import Tuned, search

FOLDER = RESULTS / "arena"
RETIRED = "retired"
"""The file of trainings that no contest asks for any more."""
Line = dict[str, Any]


class Wanted(NamedTuple):
    """A training that a campaign wants."""

    job: str
    workers: int
    steps: int
    seed: int
    settings: dict[str, Any]

    @property
    def key(self) -> str:
        """Equal for equal trainings."""
        return json.dumps(self, sort_keys=True)


class Campaign(NamedTuple):
    """What became of a method.

    Attributes:
        short, long: the search with short trainings, and that with whole ones.
        runs: the lines of its seeds; none if the optimum is at an edge.
    """

    short: Tuned
    long: Tuned
    runs: list[Line]

    @property
    def best(self) -> dict[str, Any]:
        """The settings of ``runs``, of all knobs."""
        return {**self.short.settings, **self.long.settings}

    @property
    def at_edge(self) -> tuple[str, ...]:
        """Knobs whose optimum may be beyond the grid."""
        again = set(self.long.settings)
        return tuple(knob for knob in self.short.at_edge if knob not in again) + self.long.at_edge


def campaign(
    contest: Contest, name: str, given: Campaign | None = None
) -> Generator[list[Wanted], list[Line], Campaign]:
    """Tunes a method on seeds of its own, and then trains with the seeds that are reported.

    Args:
        given: the campaign of another contest, whose best settings the method has.
    """
    method = contest.methods[name]

    def losses(
        tuning: Generator[list[dict[str, Any]], list[float], Tuned], steps: int, seeds: tuple[int, ...],
        fixed: dict[str, Any],
    ) -> Generator[list[Wanted], list[Line], Tuned]:
        answer: list[float] | None = None
        try:
            while True:
                points = tuning.send(answer)  # type: ignore[arg-type]  # None begins it
                lines = yield [wanted(steps, seed, {**fixed, **point}) for point in points for seed in seeds]
                found = list(map(loss_of, lines))
                answer = [mean(found[at : at + len(seeds)]) for at in range(0, len(found), len(seeds))]
        except StopIteration as end:
            return end.value

    def wanted(steps: int, seed: int, point: dict[str, Any]) -> Wanted:
        return Wanted(contest.job, contest.workers, steps, seed, method.settings(point, contest.workers))

    if given:
        short = replace(given.short, settings=given.best, at_edge=given.at_edge)
    else:
        short = yield from losses(search(method.knobs, contest.trials), contest.short, contest.tuning_seeds[:1], {})
    again = {knob: method.knobs[knob] for knob in contest.again if knob in method.knobs}
    started = {knob: short.settings[knob] for knob in again}
    length = contest.short if given else contest.steps
    if again:
        tuning = search(again, contest.trials, started)
        long = yield from losses(tuning, length, contest.tuning_seeds, short.settings)
    else:  # nothing to search
        long = replace(short, settings={}, at_edge=())
    tuned = Campaign(short, long, [])
    if tuned.at_edge:  # it is refused: other knobs, or more trials, come first
        return tuned
    runs = yield [wanted(contest.steps, seed, tuned.best) for seed in contest.seeds]
    return tuned._replace(runs=runs)


def replayed(contest: Contest, name: str, known: dict[str, Line]) -> tuple[Campaign | None, list[Wanted]]:
    """The campaign as far as its trainings are known, and the trainings that it wants next: none, too, where it waits
    for the contest whose settings it takes."""
    given = None
    if contest.settings_of:
        other = CONTESTS[contest.settings_of]
        same = name if name in other.methods else name.partition(",")[0]
        given = replayed(other, same, lines_of(contest.settings_of))[0]
        if not given:
            return None, []
    steps = campaign(contest, name, given)
    try:
        wanted = next(steps)
        while all(one.key in known for one in wanted):
            wanted = steps.send([known[one.key] for one in wanted])
    except StopIteration as end:
        return end.value, []
    return None, [one for one in wanted if one.key not in known]


def path_of(name: str) -> Path:
    """The file of a contest's lines."""
    return FOLDER / f"{name}.jsonl"


def key_of(line: Line) -> str:
    """Of the training of a line."""
    return Wanted(*(line[field] for field in Wanted._fields)).key


def lines_of(name: str) -> dict[str, Line]:
    """The lines of a contest, by their trainings."""
    return {key_of(line): line for line in json_lines(path_of(name))}


def write_lines(name: str, lines: dict[str, Line]) -> None:
    """The opposite of ``lines_of``."""
    path_of(name).write_text("".join(f"{json.dumps(line)}\n" for line in lines.values()))


def asked(contest: Contest, known: dict[str, Line]) -> set[str]:
    """The trainings that the campaigns of a contest ask for, as far as they are known."""
    found: set[str] = set()

    class Noting(dict[str, Line]):
        def __contains__(self, key: object) -> bool:
            found.add(str(key))
            return super().__contains__(key)

    for method in contest.methods:
        replayed(contest, method, Noting(known))
    return found


def hours_of(lines: dict[str, Line]) -> float:
    """Hours of one core that trainings have taken."""
    return sum(line["seconds"] for line in lines.values()) / 3600


def done(name: str) -> dict[str, Campaign]:
    """The methods of a contest that are through."""
    contest, known = CONTESTS[name], lines_of(name)
    found = {method: replayed(contest, method, known)[0] for method in contest.methods}
    return {method: one for method, one in found.items() if one}


def _trained(one: Wanted) -> Line:
    return {**one._asdict(), **train(one.job, one.settings, one.workers, one.steps, one.seed)}


def run_all(names: Iterable[str], processes: int, minutes: float, methods: Sequence[str] = ()) -> None:
    """Trains what is missing, a contest after the other, and writes each line when its training ends. A training that
    was retired is taken back.

    Args:
        methods: those that are trained; none: all.
    """
    end = time.monotonic() + 60 * minutes
    known = {name: lines_of(name) for name in names}
    retired = {key: line for key, line in lines_of(RETIRED).items() if "reason" not in line}
    running: dict[Future[Line], tuple[str, Wanted]] = {}
    FOLDER.mkdir(parents=True, exist_ok=True)

    def missing() -> Iterable[tuple[str, Wanted]]:
        started = {one.key for _, one in running.values()}
        for name, lines in known.items():
            for method in CONTESTS[name].methods:
                if methods and method not in methods:
                    continue
                for one in replayed(CONTESTS[name], method, lines)[1]:
                    if one.key not in started:
                        started.add(one.key)
                        yield name, one

    def begun(pool: ProcessPoolExecutor, one: Wanted) -> Future[Line]:
        if one.key not in retired:
            return pool.submit(_trained, one)
        future: Future[Line] = Future()
        future.set_result({key: value for key, value in retired[one.key].items() if key != "contest"})
        return future

    with ProcessPoolExecutor(processes) as pool:
        while True:
            if time.monotonic() < end:
                for name, one in missing():
                    if len(running) >= processes:
                        break
                    running[begun(pool, one)] = name, one
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                name, one = running.pop(future)
                line = known[name][one.key] = future.result()
                with path_of(name).open("a") as file:
                    file.write(json.dumps(line) + "\n")
                facts = f"{line['share']:.3%} of the bytes, {line['seconds']} s, {one.steps} steps, seed {one.seed}"
                print(f"{name}: {CONTESTS[name].score(line):.4f}, {facts}, {json.dumps(one.settings)}", flush=True)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Names = Annotated[list[str] | None, typer.Argument(help="contests; default: all")]


def chosen(names: list[str] | None) -> list[str]:
    """The contests of these names; all without names."""
    if unknown := set(names or ()) - set(CONTESTS):
        raise typer.BadParameter(f"no contest is named {', '.join(unknown)}; the contests are: {', '.join(CONTESTS)}")
    return names or list(CONTESTS)


@app.command()
def run(
    names: Names = None,
    processes: Annotated[int, typer.Option(min=1, help="trainings at a time, each on one thread")] = 2,
    minutes: Annotated[float, typer.Option(help="no training begins after so many minutes")] = float("inf"),
    method: Annotated[list[str] | None, typer.Option(help="methods of these contests; default: all")] = None,
) -> None:
    """Trains what is missing."""
    contests = chosen(names)
    known = {one: None for name in contests for one in CONTESTS[name].methods}
    if unknown := set(method or ()) - set(known):
        raise typer.BadParameter(f"no method is named {', '.join(unknown)}; the methods are: {', '.join(known)}")
    run_all(contests, processes, minutes, method or ())


@app.command()
def plan(names: Names = None) -> None:
    """Prints what is done, with the hours of one core that it took, and what is next."""
    for name in chosen(names):
        contest, known = CONTESTS[name], lines_of(name)
        print(f"{name}: {len(known)} trainings, {hours_of(known):.2f} hours of a core so far")
        for method in contest.methods:
            end, wanted = replayed(contest, method, known)
            state = "done" if end else f"waits for {contest.settings_of}"
            if wanted:
                state = f"wants {len(wanted)} trainings of {wanted[0].steps} steps"
            if end and end.at_edge:
                spent = max(end.short.trials, end.long.trials) >= contest.trials
                why = f"all {contest.trials} trials are spent" if spent else "the optimum is at the edge"
                state = f"refused: {why}, and better settings may be beyond: {', '.join(end.at_edge)}"
            print(f"  {method}: {state}")


@app.command()
def prune(names: Names = None) -> None:
    """Retires trainings that no campaign asks for any more, since the contests have changed. Not while ``run`` adds
    lines to the same contests."""
    retired = lines_of(RETIRED)
    for name in chosen(names):
        known = lines_of(name)
        wanted = asked(CONTESTS[name], known)
        kept = {key: line for key, line in known.items() if key in wanted}
        gone = {key: {"contest": name, **line} for key, line in known.items() if key not in kept}
        retired = {key: line for key, line in retired.items() if key not in kept} | gone
        if gone:
            write_lines(name, kept)
            print(f"{name}: {len(gone)} trainings retired")
    write_lines(RETIRED, retired)


@app.command()
def report() -> None:
    """Writes docs/results/arena.md and its pictures, and the tables of docs/which_preset.md and README.md."""
    found = {name: done(name) for name in CONTESTS}
    hours = {name: hours_of(lines_of(name)) for name in CONTESTS}
    page.PAGE.write_text(page.about(sum(hours.values()), hours_of(lines_of(RETIRED))))
    for name, contest in CONTESTS.items():
        if found[name] and not contest.repeats:
            repeated = found.get(once_more := f"{name}{ONCE_MORE}", {})
            page.write(name, contest, found[name], hours[name] + hours.get(once_more, 0.0), repeated)
    page.write_overview(CONTESTS, found)
    page.write_losses(CONTESTS, found)


if __name__ == "__main__":
    app()
