"""The emulated network: it needs root and iproute2, and nobody else's emulated network to be there."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.selection import thorough

ROOT = Path(__file__).parent.parent.parent
NETLAB = str(ROOT / "scripts" / "bench" / "netlab")
PROGRAM = """
import socket, time
import numpy as np
from mpi4py import MPI
comm = MPI.COMM_WORLD
data = np.zeros(2_500_000, np.uint8)
for _ in range(2):
    comm.Barrier()
    began = time.monotonic()
    comm.Send(data, 1) if comm.rank == 0 else comm.Recv(data, 0)
print(socket.gethostname(), "seconds", time.monotonic() - began, flush=True)
"""


def netlab(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        [NETLAB, *arguments], check=check, text=True, timeout=60, env=environment, capture_output=True
    )  # fmt: skip


def processes() -> int:
    lines = netlab("status").stdout.splitlines()[1:]
    return sum(int(line.split()[-2]) for line in lines)


@pytest.fixture
def emulated_network():
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("needs root and iproute2")
    if "hvdlab-" in subprocess.run(["ip", "netns", "list"], text=True, capture_output=True).stdout:
        pytest.skip("somebody's emulated network is there")
    if subprocess.run(["ip", "netns", "add", "hvdlab-try"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody make a network namespace")
    subprocess.run(["ip", "netns", "del", "hvdlab-try"], check=True)
    netlab("up", "2", "100mbit")
    yield
    netlab("down")
    assert "hvdlab-" not in subprocess.run(["ip", "netns", "list"], text=True, capture_output=True).stdout


@pytest.mark.launch
@thorough
def test_emulated_network(emulated_network: None) -> None:
    assert netlab("status").stdout.startswith("2 hosts at 100mbit")
    done = netlab("run", "mpirun", "-np", "2", sys.executable, "-c", PROGRAM)
    assert "host1" in done.stdout and "host2" in done.stdout
    # 20 Mbit on a link of 100 Mbit/s.
    seconds = max(float(line.split()[-1]) for line in done.stdout.splitlines() if "seconds" in line)
    assert 0.15 < seconds < 10
    assert netlab("run", "sh", "-c", "exit 7", check=False).returncode == 7


@pytest.mark.launch  # like the one above: there is room for one network at a time
@thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_a_killed_run(emulated_network: None, number: signal.Signals) -> None:
    with subprocess.Popen([NETLAB, "run", "sh", "-c", "sleep 100 & sleep 100"]) as job:
        deadline = time.monotonic() + 20
        while processes() < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert processes() >= 2
        job.send_signal(number)
    deadline = time.monotonic() + 20
    while processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes() == 0


def test_wrong_words() -> None:
    for arguments in ([], ["up", "3"], ["sideways"]):
        done = netlab(*arguments, check=False)
        assert done.returncode and "netlab" in done.stderr
