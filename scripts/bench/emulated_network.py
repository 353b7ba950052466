"""Runs a program on each host of the emulated network of netlab, and reads what its ranks need to know there."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("train",))

import numpy as np
from step_times import interleaved

ROOT = Path(__file__).resolve().parents[2]
MEMORY = "memory"
"""In place of a rate: no emulated network. The ranks share this machine's memory."""
RATE_HELP = f"rate of each link, as in 1gbit or 100mbit; {MEMORY}: ranks share this machine's memory"
PRIORITY_HELP = "scheduling priority of the ranks over other work on this machine, 0 to 20 (needs root)"


def run(
    arguments: Sequence[str],
    hosts: int,
    rate: str,
    ranks: int = 1,
    variables: Mapping[str, str] | None = None,
    seconds: float | None = None,
) -> None:
    """Creates an emulated network, runs a Python program on each of its hosts, and removes it.

    Args:
        arguments: the program and its arguments.
        rate: of each link, in the format of tc, or ``MEMORY``.
        ranks: of each host, with one thread each, since they share the cores of this machine.
        variables: of the ranks' environment, beside the caller's.
        seconds: after which the program is ended by subprocess.TimeoutExpired; None: there is no limit.
    """
    # As docs/using.md says for ranks without a spare core.
    given = {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1", **(variables or {})}
    environment = {**os.environ, **given}
    command = ["mpirun", "-np", str(hosts * ranks)]
    for name in [*given, *(["PYTHONPATH"] if "PYTHONPATH" in environment else [])]:
        command += ["-x", name]
    if rate == MEMORY:
        subprocess.run([*command, sys.executable, *arguments], check=True, env=environment, timeout=seconds)
        return
    command += ["--oversubscribe", "-H", ",".join(f"{address(host)}:{ranks}" for host in range(hosts))]
    netlab = str(ROOT / "scripts" / "bench" / "netlab")
    subprocess.run([netlab, "up", str(hosts), rate], check=True)
    try:
        subprocess.run(
            [netlab, "run", *command, sys.executable, *arguments], check=True, env=environment, timeout=seconds
        )
    finally:
        subprocess.run([netlab, "down"], check=True)


def address(host: int) -> str:
    """Of a host of the emulated network; the first has the number 0."""
    return f"10.77.0.{host + 1}"


def prioritize(priority: int) -> None:
    """Gives this rank a priority over other work on this machine, 0 to 20. It needs root."""
    if priority:
        # Linux divides the cores between sessions (autogroups); a nice value has an effect only within a session.
        Path("/proc/self/autogroup").write_text(str(-priority))


def received_bytes() -> int:
    """The number of bytes that this host has received over its link so far; 0 where there is no emulated network."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("e0:"):
            return int(line.split(":")[1].split()[0])
    return 0


def measured(
    steps: Mapping[str, Callable[[], object]],
    rounds: int,
    slowest: Callable[[np.ndarray], np.ndarray],
    warm: int,
    prepare: Callable[[str], None] | None = None,
) -> dict[str, tuple[list[float], list[float], list[float]]]:
    """Interleaves steps (step_times.py).

    Returns:
        Of each, the seconds and the bytes that came over the link in the rounds that count, of the rank with the most;
        and the seconds that all threads of this rank were on a processor.
    """
    received: dict[str, list[int]] = {name: [] for name in steps}
    busy: dict[str, list[float]] = {name: [] for name in steps}

    def counted(name: str) -> None:
        before, busy_before = received_bytes(), time.process_time()
        steps[name]()
        busy[name].append(time.process_time() - busy_before)
        received[name].append(received_bytes() - before)

    seconds = interleaved({name: partial(counted, name) for name in steps}, rounds, slowest, warm, prepare)
    most = {name: slowest(np.array(counts[warm:], np.float64)).tolist() for name, counts in received.items()}
    return {name: (seconds[name], most[name], busy[name][warm:]) for name in steps}


def bits_per_second(rate: str) -> float:
    """The rate of a link, in the format of tc: 1gbit, 100mbit; infinite for ``MEMORY``."""
    if rate == MEMORY:
        return float("inf")
    units = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
    number = rate.removesuffix("bit")
    return float(number[:-1]) * units[number[-1]] if number[-1] in units else float(number)
