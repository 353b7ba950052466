"""Jobs of a few ranks that are killed and started again. Their ranks are forked from a process that has imported what
they need: imports of PyTorch would take most of the time of such a test."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.ranks import free_port

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.adapters.peers_job", "tests.adapters.torchft_job"])


def _run(main: Callable[..., None], path: Path, arguments: tuple[object, ...], environment: dict[str, str]) -> None:
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1), os.dup2(out, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    os.environ.update(environment)
    main(*map(str, arguments))


class Job:
    """A job of ``ranks`` ranks, as torchrun starts them. ``path`` has what they print.

    Args:
        main: what each of them calls with the arguments, as texts.
    """

    def __init__(
        self, main: Callable[..., None], path: Path, *arguments: object, ranks: int, **environment: str
    ) -> None:
        self.path, port = path, free_port()
        self.processes = [
            CONTEXT.Process(target=_run, args=(main, path, arguments, {
                "OMP_NUM_THREADS": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": port, "RANK": str(rank),
                "WORLD_SIZE": str(ranks), **environment,
            }))
            for rank in range(ranks)
        ]  # fmt: skip
        for one in self.processes:
            one.start()

    def kill(self) -> None:
        """As a machine that fails: nothing ends in order."""
        for one in self.processes:
            one.kill()
        for one in self.processes:
            one.join()

    def failed(self) -> bool:
        return any(one.exitcode not in (None, 0) for one in self.processes)

    def ended(self) -> Job:
        """Waits until all ranks have ended, in order."""
        end = time.monotonic() + 90
        for one in self.processes:
            one.join(max(0.0, end - time.monotonic()))
        assert [one.exitcode for one in self.processes] == [0] * len(self.processes), self.path.read_text()[-3000:]
        return self
