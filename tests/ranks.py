"""Starts programs under real launchers, with a time limit; and what such a program of test cases is made of."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAUNCHERS = {
    "mpirun": ["mpirun", "-np", "{ranks}"],
    "horovodrun --mpi": ["horovodrun", "--mpi", "-np", "{ranks}"],
    "horovodrun --gloo": ["horovodrun", "--gloo", "-np", "{ranks}", "-H", "localhost:{ranks}"],
}


def launch(
    launcher: str, ranks: int, program: Path, *arguments: str, seconds: float = 240, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Runs ``program`` on that many ranks; fails the test where it hangs or (``check``) ends with an error."""
    binaries = Path(sys.executable).parent
    command = [part.format(ranks=ranks) for part in LAUNCHERS[launcher]]
    command[0] = str(binaries / command[0])
    command += [sys.executable, str(program), *arguments]
    environment = {
        **os.environ,
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        "OMP_NUM_THREADS": "1",
    }
    # A process group of its own: a launcher that hangs is ended with all its ranks.
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            output, _ = process.communicate()
            raise AssertionError(f"{' '.join(command)} did not end in {seconds} s; it said:\n{output}") from None
    if check and process.returncode:
        raise AssertionError(f"{' '.join(command)} ended with {process.returncode}; it said:\n{output}")
    return subprocess.CompletedProcess(command, process.returncode, output, "")


def run_cases(cases: dict[str, Callable[[], None]], rank: int, barrier: Callable[[], object]) -> None:
    """Runs the cases named on the command line, or all; each rank runs each case, in order."""
    for chosen in sys.argv[1:] or cases:
        result = "passed"
        try:
            cases[chosen]()
        except pytest.skip.Exception as reason:
            result = f"skipped ({reason})"
        except BaseException:
            print(f"FAILED {chosen} on rank {rank}\n{traceback.format_exc()}", flush=True)
            raise
        barrier()
        if rank == 0:
            print(f"{result} {chosen}", flush=True)
