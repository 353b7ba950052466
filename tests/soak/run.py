"""`make soak`: broken input under the sanitizers, and jobs with faults at random.

    python tests/soak/run.py --total-seconds 3600     # half of it broken input, half episodes
    python tests/soak/run.py --episodes 0 1 2         # these episodes, and nothing else
    python tests/soak/run.py --total-seconds 3600 --write

The episodes are those of the seeds from ``--first`` on (tests/soak/episodes.py). Those of one launcher and framework
share launches, until a fault ends one. ``--write`` puts the figures into docs/reliability.md. What the ranks printed is
kept in build/soak for the episodes that failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import date
from itertools import count, islice
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
for folder in (ROOT, *sorted((ROOT / "scripts").iterdir())):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

import doc_sections  # noqa: E402

from tests.case_runner import Records  # noqa: E402
from tests.ranks import start, stop  # noqa: E402
from tests.soak.episodes import FAULTS, LIMIT_SECONDS, PROGRESS, RANKS, WAYS, Episode, Way, episode, judge  # noqa: E402

JOB = Path(__file__).with_name("job.py")
KEPT = ROOT / "build" / "soak"
START_SECONDS = 180.0
"""The longest time that the ranks may take until their first episode."""
PER_LAUNCH = 20
"""Episodes of a launch."""
CONTAINERS, STEPS = 10**7, 10**4
"""What an hour is to reach."""
OUTCOMES = ("equal", "same error", "job ended", "failed")


@dataclass
class Figures:
    """What was done, and how it ended."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    steps: int = 0
    launches: int = 0
    seconds: float = 0.0
    inputs: int = 0
    fuzz_seconds: float = 0.0
    fuzz_failed: bool = False

    def add(self, one: Episode, outcome: str, why: str, steps: int) -> None:
        """Counts an episode."""
        self.outcomes[one.fault, outcome] += 1
        self.steps += steps
        print(f"{outcome}: {one}", flush=True)
        if outcome == "failed":
            self.failures.append(f"{one}: {why}")
            print(f"    {why}\n    repeat it: python tests/soak/run.py --episodes {one.seed}", flush=True)

    def table(self) -> str:
        """In Markdown: episodes by fault and outcome."""
        rows = [f"| fault | {' | '.join(OUTCOMES)} |", f"| --- |{' --- |' * len(OUTCOMES)}"]
        for fault, words in FAULTS.items():
            counts = [self.outcomes[fault, outcome] for outcome in OUTCOMES]
            if any(counts):
                rows.append(f"| {words} | {' | '.join(map(str, counts))} |")
        counts = [sum(n for (_, outcome), n in self.outcomes.items() if outcome == column) for column in OUTCOMES]
        rows.append(f"| all | {' | '.join(map(str, counts))} |")
        return "\n".join(rows)

    def summary(self) -> str:
        """In Markdown: all figures."""
        lines = []
        if self.fuzz_seconds:
            ended = "a failure" if self.fuzz_failed else "no failure"
            lines.append(
                f"{self.inputs:,} broken containers, sections, streams and states under the sanitizers in "
                f"{self.fuzz_seconds:.0f} s: {ended}."
            )
        lines.append(
            f"{sum(self.outcomes.values()):,} episodes with {self.steps:,} steps on {RANKS} ranks, in {self.launches} "
            f"launches and {self.seconds:.0f} s:"
        )
        return "\n\n".join([*lines, self.table()])

    @property
    def good(self) -> bool:
        """Whether nothing failed."""
        return not self.failures and not self.fuzz_failed


class Launch:
    """One start of a job, which runs episodes until one ends it.

    Args:
        way: the launcher and the framework.
        episodes: of this way.
        figures: gets the outcomes.
        limit: seconds without progress after which an episode has failed.
    """

    def __init__(self, way: Way, episodes: list[Episode], figures: Figures, limit: float) -> None:
        self.way, self.episodes, self.figures, self.limit = way, episodes, figures, limit
        self.folder = Path(tempfile.mkdtemp(prefix="soak-"))
        self.records = Records(self.folder, RANKS)

    def run(self) -> list[Episode]:
        """Runs; returns the episodes that were not begun."""
        launcher, framework = self.way
        self.figures.launches += 1
        seeds = [str(one.seed) for one in self.episodes]
        output = (self.folder / "output").open("wb")
        process = start(launcher, RANKS, JOB, framework, str(self.folder), str(self.limit), *seeds, output=output)
        try:
            if not self._wait(process, "ready", START_SECONDS):
                raise RuntimeError(f"the ranks did not start:\n{(self.folder / 'output').read_text(errors='replace')}")
            left = list(self.episodes)
            while left:
                one = left.pop(0)
                whole = self._wait(process, str(one.seed), self.limit)
                records = self.records.read(str(one.seed))
                done = {record["end"] for record in records.values()}
                # After these the ranks end by themselves; until then, some rank may still be in the episode.
                ends = not whole or not left or (done != {"finished"} and (framework != "mpi4py" or done != {"error"}))
                status = self._status(process) if ends else None
                records = self.records.read(str(one.seed))
                outcome, why = judge(one, self.folder, records, status)
                if outcome != "failed" and ends and status is None:
                    outcome, why = "failed", f"the job did not end within {self.limit:.0f} s after it"
                steps = min((record["steps"] for record in records.values()), default=0)
                self.figures.add(one, outcome, why, steps)
                if outcome == "failed":
                    shutil.copytree(self.folder, KEPT / str(one.seed), dirs_exist_ok=True)
                if ends:
                    return left
            return []
        finally:
            if process.poll() is None:
                stop(process)
            output.close()
            shutil.rmtree(self.folder)

    def _wait(self, process: subprocess.Popen[bytes], name: str, seconds: float) -> bool:
        """Waits until all ranks have written a record (True), or the job has ended, or no rank has made progress for so
        long."""
        progress, last = self._progress(), time.monotonic()
        while True:
            ended = process.poll() is not None
            if len(self.records.read(name)) == RANKS:
                return True
            if ended or time.monotonic() - last > seconds:
                return False
            if self._progress() != progress:
                progress, last = self._progress(), time.monotonic()
            time.sleep(0.02)

    def _progress(self) -> tuple[int, int]:
        """Changes while some rank makes steps or ends an episode."""
        try:
            return self.records.count(), (self.folder / PROGRESS).stat().st_mtime_ns
        except FileNotFoundError:
            return self.records.count(), 0

    def _status(self, process: subprocess.Popen[bytes]) -> int | None:
        """The launcher's exit status; None if it does not end in time."""
        try:
            return process.wait(self.limit)
        except subprocess.TimeoutExpired:
            return None


def run_episodes(
    seeds: Iterable[int], figures: Figures, seconds: float | None = None, limit: float = LIMIT_SECONDS
) -> None:
    """Runs the episodes with these seeds, those of one way together.

    Args:
        seeds: of the episodes; may be endless if there is a limit.
        figures: gets the outcomes.
        seconds: after which no launch is started; None: no limit.
        limit: seconds without progress after which an episode has failed.
    """
    began = time.monotonic()
    coming = iter(seeds)
    waiting: dict[Way, list[Episode]] = {way: [] for way in WAYS}
    more = True
    while seconds is None or time.monotonic() - began < seconds:
        while more and not any(len(some) >= PER_LAUNCH for some in waiting.values()):
            drawn = list(islice(coming, 1))
            more = bool(drawn)
            for seed in drawn:
                one = episode(seed)
                waiting[one.way].append(one)
        way = max(waiting, key=lambda one: len(waiting[one]))
        if not waiting[way]:
            break
        waiting[way] = Launch(way, waiting[way][:PER_LAUNCH], figures, limit).run() + waiting[way][PER_LAUNCH:]
    figures.seconds += time.monotonic() - began


def fuzz(seconds: int, figures: Figures) -> None:
    """Runs `make fuzz` for so long, and counts its inputs."""
    began = time.monotonic()
    # This may run in a recipe of make, whose variables would reach the other make.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "-s", "fuzz", f"TOTAL_SECONDS={seconds}", "ARGS="]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        figures.inputs += inputs_of(line)
    figures.fuzz_failed = process.wait() != 0
    figures.fuzz_seconds += time.monotonic() - began


def inputs_of(line: str) -> int:
    """The number of inputs in a line of tests/fuzz/run.py about one target."""
    found = re.fullmatch(r"\S+: (?:ok|FAILED), (\d+) runs\s*", line)
    return int(found[1]) if found else 0


def seeds_from(first: int) -> Iterator[int]:
    """All seeds from this one on."""
    return count(first)


def main() -> int:
    parser = argparse.ArgumentParser(description="Broken input under the sanitizers, and jobs with faults at random.")
    parser.add_argument("--total-seconds", type=int, default=3600, help="of both halves; default: 3600")
    parser.add_argument("--first", type=int, default=0, help="the first seed; default: 0")
    parser.add_argument("--episodes", type=int, nargs="+", metavar="SEED", help="run these episodes, and nothing else")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds without progress in an episode")
    parser.add_argument("--no-fuzz", action="store_true", help="episodes alone")
    parser.add_argument("--write", action="store_true", help="write the figures into docs/reliability.md")
    asked = parser.parse_args()
    figures = Figures()
    if asked.episodes:
        run_episodes(asked.episodes, figures, None, asked.limit)
    else:
        began = time.monotonic()
        if not asked.no_fuzz:
            fuzz(asked.total_seconds // 2, figures)
        run_episodes(seeds_from(asked.first), figures, asked.total_seconds - (time.monotonic() - began), asked.limit)
    print(f"\n{figures.summary()}")
    if not asked.episodes and (figures.steps < STEPS or figures.inputs < CONTAINERS):
        print(f"soak: an hour is to reach {CONTAINERS:,} inputs and {STEPS:,} steps; this run was shorter or slower")
    for failure in figures.failures:
        print(f"soak: failed: {failure}")
    if asked.write:
        body = f"Written by `make soak ARGS=--write` on {date.today()}.\n\n{figures.summary()}"
        doc_sections.write(ROOT / "docs" / "reliability.md", "soak", "The last long run", body)
    return 0 if figures.good else 1


if __name__ == "__main__":
    sys.exit(main())
