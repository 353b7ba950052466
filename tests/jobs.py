"""Reports each case of a program that runs on several ranks as a test of its own, from one launch for all of them.

The first test that asks for a case of a job starts the job, with all its cases that this session has selected. Each
test waits until all ranks have ended its case. If the job breaks, the case that ran is reported with the job's output,
and the next test starts the job again with the cases that are left.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.case_runner import CASE_SECONDS, Records, case_names
from tests.ranks import start, stop

END_SECONDS = 60.0
"""The longest time that a job may take to end after its last case."""
LINES = 100
"""Lines of the job's output in a report."""


@dataclass(frozen=True)
class Job:
    """A program under a launcher.

    Args:
        program: a Python file that calls ``case_runner.run_cases``.
        launcher: one of ``ranks.LAUNCHERS``.
        ranks: the number of ranks.
        seconds: the longest time that one launch may take.
    """

    program: Path
    launcher: str
    ranks: int
    seconds: float = 900

    def __str__(self) -> str:
        return f"{self.launcher}-{self.ranks}"


def each_case(
    jobs: list[Job],
    *files: Path,
    once: Mapping[str, Job] = MappingProxyType({}),
    few: Mapping[Job, Collection[str]] = MappingProxyType({}),
    thorough: Collection[Job | str] = (),
) -> list[Any]:
    """Values for ``parametrize(("job", "case"), ...)``: every case in every job, one job after another.

    Args:
        jobs: the jobs, which run programs with the same cases.
        files: the files that the cases are in.
        once: cases that depend neither on the launcher nor on the number of ranks, with the one job that runs each.
        few: jobs that run some of the cases only, since other jobs differ from them in little.
        thorough: jobs, and cases, that `make test` leaves to `make test-all`.
    """
    names = case_names(*files)
    assert names, f"there is no case in {', '.join(map(str, files))}"
    assert once.keys() <= set(names) and set(once.values()) <= set(jobs), once
    assert few.keys() <= set(jobs) and set().union(*few.values()) <= set(names), few
    assert set(thorough) <= {*jobs, *names}, thorough

    def marks(job: Job, name: str) -> list[pytest.MarkDecorator]:
        # A job's own limits end it, with a better report, before pytest's limit is reached.
        limit = pytest.mark.timeout(job.seconds + 2 * END_SECONDS)
        return [limit, pytest.mark.thorough] if {job, name} & set(thorough) else [limit]

    return [
        pytest.param(job, name, id=f"{job}-{name}", marks=marks(job, name))
        for job in jobs
        for name in names
        if (once[name] == job if name in once else name in few.get(job, names))
    ]


@dataclass
class Outcome:
    """How a case ended.

    Args:
        kind: "passed", "skipped" or "failed".
        text: the reason.
        values: what the case returned, by rank.
    """

    kind: str
    text: str = ""
    values: list[Any] = field(default_factory=list)


class Launch:
    """One start of a job.

    Args:
        job: the job.
        cases: the cases that it runs, in this order.
        folder: an empty folder.
    """

    def __init__(self, job: Job, cases: list[str], folder: Path) -> None:
        self.job = job
        self.left = list(cases)
        self.failed: list[str] = []
        self.records = Records(folder, job.ranks)
        self.output = folder / "output"
        self.began = time.monotonic()
        with self.output.open("wb") as output:
            self.process = start(job.launcher, job.ranks, job.program, "--results", str(folder), *cases, output=output)

    def next(self) -> dict[str, Outcome]:
        """Waits for the next case to end. Returns nothing if only a new launch can tell how that case ends."""
        case = self.left[0]
        progress, last = -1, time.monotonic()
        while True:
            # Looked at before the records: what a job wrote before it ended is found.
            ended, now = self.process.poll() is not None, time.monotonic()
            records = self.records.read(case)
            if len(records) == self.job.ranks:
                return {self.left.pop(0): self._judged(case, records)}
            if self.records.count() != progress:
                progress, last = self.records.count(), now
            if ended:
                return self._broken(case, f"The job ended with status {self.process.returncode}.")
            if now - last > CASE_SECONDS:
                return self._broken(case, f"No rank ended it within {CASE_SECONDS:.0f} s. The job was stopped.")
            if now - self.began > self.job.seconds:
                return self._broken(case, f"The job took more than {self.job.seconds:.0f} s. It was stopped.")
            time.sleep(0.01)

    def close(self) -> None:
        """Ends the job if it still runs."""
        self.left.clear()
        if self.process.poll() is None:
            stop(self.process)

    def _judged(self, case: str, records: dict[int, Any]) -> Outcome:
        """The outcome of a case that all ranks have ended."""
        kinds = {record["outcome"] for record in records.values()}
        if kinds == {"passed"}:
            outcome = Outcome("passed", "", [record["value"] for _, record in sorted(records.items())])
        elif kinds == {"skipped"}:
            outcome = Outcome("skipped", records[0]["text"])
        else:
            outcome = self._failure(case, "", records)
        if not self.left:
            problem = self._end()
            if problem and not self.failed:
                outcome = self._failure(case, problem, records)
        return outcome

    def _end(self) -> str:
        deadline = time.monotonic() + END_SECONDS
        while self.process.poll() is None:
            if time.monotonic() > deadline:
                stop(self.process)
                return f"The job did not end within {END_SECONDS:.0f} s after its last case. It was stopped."
            time.sleep(0.01)
        status = self.process.returncode
        return f"All cases ended, then the job ended with status {status}." if status else ""

    def _broken(self, case: str, problem: str) -> dict[str, Outcome]:
        """The outcomes after the job ended, or hung, in a case."""
        left = list(self.left)
        self.close()
        if len(self.records.read("ready")) < self.job.ranks:
            return {name: self._failure("", f"The job did not start. {problem}", {}) for name in left}
        if self.failed:
            return {}  # the case that failed before may be the cause
        return {case: self._failure(case, problem, self.records.read(case))}

    def _failure(self, case: str, problem: str, records: dict[int, Any]) -> Outcome:
        job = self.job
        parts = [f"{case or 'No case'} of {job.program.name} on {job.ranks} ranks, under {job.launcher}", problem]
        if self.failed:
            parts.append(f"Failed before it in this launch, and may be the cause: {', '.join(self.failed)}.")
        ranks = defaultdict(list)
        for rank in range(job.ranks):
            record = records.get(rank)
            ranks["did not end it" if record is None else f"{record['outcome']}\n{record['text']}"].append(rank)
        if case:
            self.failed.append(case)
            parts += [f"--- rank {', '.join(map(str, which))}: {text}" for text, which in ranks.items()]
        lines = self.output.read_text(errors="replace").splitlines()
        cut = f" (the last {LINES} of {len(lines)} lines)" if len(lines) > LINES else ""
        parts += [f"--- output of all ranks{cut}:", *lines[-LINES:]]
        return Outcome("failed", "\n".join(part for part in parts if part))


class Jobs:
    """The jobs of a pytest session. One runs at a time.

    Args:
        selected: the cases of each job that this session runs, in order.
        folder: an empty folder.
    """

    def __init__(self, selected: dict[Job, list[str]], folder: Path) -> None:
        self.selected = selected
        self.folder = folder
        self.outcomes: dict[tuple[Job, str], Outcome] = {}
        self.launch: Launch | None = None

    def check(self, job: Job, case: str) -> list[Any]:
        """Waits until all ranks have ended a case; starts the job if it must.

        Returns:
            What the case returned, by rank.

        Raises:
            pytest.skip.Exception: all ranks skipped it.
            pytest.fail.Exception: it failed on a rank, or the job broke in it.
        """
        while (job, case) not in self.outcomes:
            if not self.launch or self.launch.job != job or case not in self.launch.left:
                while self.launch:
                    self._next()
                if (job, case) in self.outcomes:
                    break
                left = [name for name in self.selected.get(job, []) if (job, name) not in self.outcomes]
                folder = Path(tempfile.mkdtemp(dir=self.folder))
                self.launch = Launch(job, left if case in left else [case], folder)
            self._next()
        outcome = self.outcomes[job, case]
        if outcome.kind == "skipped":
            pytest.skip(outcome.text)
        if outcome.kind == "failed":
            pytest.fail(outcome.text, pytrace=False)
        return outcome.values

    def close(self) -> None:
        """Ends the job that runs."""
        if self.launch:
            self.launch.close()

    def _next(self) -> None:
        assert self.launch
        for name, outcome in self.launch.next().items():
            self.outcomes[self.launch.job, name] = outcome
        if not self.launch.left:
            self.launch = None
