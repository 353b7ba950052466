"""What each rank of the soak runs: episodes, one after the other.

    mpirun -np 3 python tests/soak/job.py FRAMEWORK FOLDER LIMIT SEED [SEED ...]

A rank writes how it ended each episode into the folder (``Records`` of tests/case_runner.py). Ranks wait for each other
between episodes by these files alone, because Horovod and MPI may be unusable. After an error, ranks under Horovod end,
as a user's script would: what is left of the step is in Horovod's queue.
"""

from __future__ import annotations

import faulthandler
import hashlib
import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.case_runner import Records
from tests.soak import injected
from tests.soak.episodes import PROGRESS, RANKS, Episode, episode, segments_file
from tests.soak.runners import RUNNERS, Runner

# Errors as TensorFlow quotes them, with a traceback.
QUOTED = re.compile(r"^(\w+(?:Error|Exception)): (.*)$", re.MULTILINE)


def said(error: BaseException) -> str:
    """The type and the text of an error, which must be the same on all ranks."""
    if type(error).__module__.startswith("tensorflow"):
        quoted = QUOTED.findall(str(error))
        if quoted:
            return ": ".join(quoted[-1])
    return f"{type(error).__name__}: {error}"


class Injector:
    """Puts an episode's fault into the steps of this rank."""

    def __init__(self, one: Episode, rank: int) -> None:
        self.one, self.rank = one, rank
        self.allocations, self.messages = injected.Allocations(), injected.Messages()

    def prepare(self, step: int, inside: ExitStack) -> Callable[[], None] | None:
        """Enters what the step needs into ``inside``; returns the hook for the step, or None."""
        one = self.one
        if self.rank != one.bad or step not in (one.at - 1, one.at):
            return None
        point = one.point if step == one.at else None  # the step before is counted
        hooks = {"stopped": partial(injected.stop, one.seconds), "killed": injected.kill, "raised": injected.fail}
        hook = hooks.get(one.fault)
        if one.fault == "memory":
            inside.enter_context(self.allocations.watched(point))
        elif one.over_mpi and one.fault == "corrupted":
            inside.enter_context(self.messages.watched(point, np.random.default_rng(one.seed)))
        elif one.over_mpi and one.fault in ("stopped", "killed") and one.seed % 2:  # within an exchange
            inside.enter_context(self.messages.watched(point, None, hook))
            return None
        elif one.fault == "corrupted" and step == one.at:
            inside.enter_context(injected.corrupted_container(np.random.default_rng(one.seed)))
        return hook if step == one.at else None


def run(one: Episode, runner: Runner, rank: int, injector: Injector, record: dict[str, Any], folder: Path) -> None:
    """Makes the episode's steps; fills the record, and writes the segments."""
    segments: list[list[np.ndarray]] = []
    came, sent = np.zeros((2, one.numel))
    sums = hashlib.sha256()
    restored = False
    state: Any = None
    step = 0
    while step < one.steps:
        mine = rank == one.bad and step == one.at and not restored
        if one.fault == "config" and mine:
            runner.change()
        if one.fault == "state" and mine:
            try:
                runner.load_with_nan()
            except ValueError:
                pass
        if one.fault == "restored" and not restored and step == one.at:
            state = runner.state(), came.copy(), sent.copy()
        if one.fault == "restored" and not restored and step == one.at + 2:
            saved, came, sent = state
            runner.load(saved)
            restored, step = True, one.at
            continue
        gradient = one.gradient(step, rank)
        if one.fault == "nan" and step == one.at:
            segments.append([came, runner.residual(), sent])
        with ExitStack() as inside:
            total = runner.step(gradient, injector.prepare(step, inside))
        sums.update(total.tobytes())
        finite = bool(np.isfinite(total).all())
        if finite == (one.fault == "nan" and step == one.at):
            raise AssertionError(f"the sum of step {step} is {'finite' if finite else 'not finite'}")
        if finite:
            runner.apply()
            came += gradient
            sent += total
        else:  # the step is skipped, and what the other ranks sent in it is lost
            came, sent = runner.residual().astype(np.float64), np.zeros(one.numel)
        step += 1
        record["steps"] += 1
        (folder / PROGRESS).touch()
    segments.append([came, runner.residual(), sent])
    np.save(segments_file(folder, one.seed, rank), np.array(segments))
    sums.update(runner.parameters().tobytes())
    record["digest"] = sums.hexdigest()


def main() -> None:
    framework, folder, seconds, *seeds = sys.argv[1:]
    limit = float(seconds)
    records = Records(Path(folder), RANKS)
    faulthandler.enable()
    if framework == "mpi4py":
        from mpi4py import MPI

        rank = MPI.COMM_WORLD.rank
    else:
        if framework == "torch":
            import horovod.torch as hvd
        else:
            import horovod.tensorflow as hvd
        hvd.init()
        rank = hvd.rank()
    records.write("ready", rank, None)
    for seed in map(int, seeds):
        one = episode(seed)
        record: dict[str, Any] = {"end": "finished", "error": "", "digest": "", "steps": 0}
        injector = Injector(one, rank)
        if rank == 0:
            print(one, flush=True)
        faulthandler.dump_traceback_later(0.9 * limit)
        try:
            run(one, RUNNERS[framework](one), rank, injector, record, Path(folder))
        except Exception as error:
            allocations = injector.allocations
            alone = isinstance(error, injected.UserError) or (allocations.failed and not allocations.in_exchange)
            record |= {"end": "left" if alone else "error", "error": said(error)}
        faulthandler.cancel_dump_traceback_later()
        records.write(str(seed), rank, record)
        if record["end"] == "left":
            sys.exit(1)
        if not records.wait_for_all(str(seed), limit):
            sys.exit(1)
        ends = {one_record["end"] for one_record in records.read(str(seed)).values()}
        if ends != {"finished"} and (framework != "mpi4py" or ends != {"error"}):
            sys.exit(1)


if __name__ == "__main__":
    main()
