"""Starts programs under real launchers, with a time limit."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parent.parent
BINARIES = Path(sys.executable).parent
LAUNCHERS = {
    "mpirun": ["mpirun", "-np", "{ranks}"],
    "mpirun tcp": ["mpirun", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo", "-np", "{ranks}"],
    "horovodrun --mpi": ["horovodrun", "--mpi", "-np", "{ranks}"],
    "horovodrun --gloo": ["horovodrun", "--gloo", "-np", "{ranks}", "-H", "localhost:{ranks}"],
    "torchrun": ["torchrun", "--standalone", "--no-python", "--nproc-per-node", "{ranks}"],
    "elastic": ["horovodrun", "--gloo", "--network-interfaces", "lo", "-np", "{ranks}", "--min-np", "1",
                "--max-np", "3", "--host-discovery-script", "{hosts}"],
}  # fmt: skip
running_test: pytest.Item | None = None
"""The test that runs, set by conftest.py."""


def start(
    launcher: str, ranks: int, program: Path, *arguments: str, output: Any, hosts: str = ""
) -> subprocess.Popen[bytes]:
    """Starts ``program`` on that many ranks of this machine.

    Args:
        launcher: one of ``LAUNCHERS``.
        ranks: the number of ranks.
        program: a Python file.
        arguments: its command line.
        output: a file for what launcher and ranks print.
        hosts: for ``elastic``, the program that prints the hosts.

    Raises:
        pytest.UsageError: the test that runs has no marker ``launch``.
    """
    if running_test is not None and running_test.get_closest_marker("launch") is None:
        raise pytest.UsageError(f"{running_test.nodeid} starts {launcher}: mark it with @pytest.mark.launch")
    command = [part.format(ranks=ranks, hosts=hosts) for part in LAUNCHERS[launcher]]
    command[0] = str(BINARIES / command[0])
    command += [sys.executable, str(program), *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return str(found.getsockname()[1])


def environment(*folders: Path) -> dict[str, str]:
    """Of ranks and launchers; programs in ``folders`` come first."""
    return {
        **os.environ,
        "PATH": os.pathsep.join(map(str, [*folders, BINARIES, os.environ["PATH"]])),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",  # see abort_ranks
        # With AVX-512, oneDNN rounds a step in a tf.function otherwise than an eager one; tests compare their bits.
        "TF_ENABLE_ONEDNN_OPTS": "0",
    }


def ranks_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """All processes that a launcher has started; none if it has ended."""
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def abort_ranks(process: subprocess.Popen[bytes]) -> None:
    """Ends the ranks of a launcher, which print the calls that they are in (PYTHONFAULTHANDLER)."""
    process.send_signal(signal.SIGSTOP)  # it would kill the others after the first
    for rank in ranks_of(process):
        with suppress(psutil.NoSuchProcess):
            if "python" in rank.name():
                rank.send_signal(signal.SIGABRT)
    time.sleep(1)
    process.send_signal(signal.SIGCONT)
    time.sleep(1)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a launcher and all its ranks, which are in process groups of their own."""
    ranks = ranks_of(process)
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for rank in ranks:
        try:
            rank.kill()
        except psutil.NoSuchProcess:
            pass


def launch(
    launcher: str, ranks: int, program: Path, *arguments: str, seconds: float = 240, check: bool = True, hosts: str = ""
) -> subprocess.CompletedProcess[str]:
    """Runs ``program`` on that many ranks; see ``start``.

    Args:
        seconds: the longest time that it may take.
        check: whether an exit status other than 0 fails the test.

    Returns:
        The command, its exit status, and what launcher and ranks printed.

    Raises:
        AssertionError: the program took too long, or (with ``check``) ended with an error.
    """
    with tempfile.TemporaryFile() as output:

        def said() -> str:
            output.seek(0)
            return output.read().decode(errors="replace")

        process = start(launcher, ranks, program, *arguments, output=output, hosts=hosts)
        command = " ".join(map(str, process.args))  # type: ignore[arg-type]
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            abort_ranks(process)
            stop(process)
            raise AssertionError(f"{command} did not end in {seconds} s; it printed:\n{said()}") from None
        except BaseException:
            stop(process)
            raise
        if check and process.returncode:
            raise AssertionError(f"{command} ended with {process.returncode}; it printed:\n{said()}")
        return subprocess.CompletedProcess(process.args, process.returncode, said(), "")
