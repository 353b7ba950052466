"""The cores that a rank really has."""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
YIELDS = "OMPI_MCA_mpi_yield_when_idle"
POLLS = (
    "this rank has one core, and Horovod's thread takes it while it waits for the other ranks, since Open MPI polls: "
    f"set the environment variable {YIELDS} to 1 (mpirun -x {YIELDS}=1), so that the threads that compute go first"
)
_log = logging.getLogger("hvd_deepreduce")


def of_rank(local_size: int, cgroup: Path = CGROUP) -> int:
    """The cores of this rank, one of ``local_size`` ranks on this host, as ``share``; at least 1."""
    return max(1, int(share(local_size, cgroup)))


def share(local_size: int, cgroup: Path = CGROUP) -> float:
    """How many cores this rank has, one of ``local_size`` ranks on this host.

    They are those that the scheduler lets the process use, divided by the ranks that may use them too, and no more than
    the time that a container is granted (``docker run --cpus``): threads beyond it would only wait for each other.

    Args:
        cgroup: where the kernel describes the container's limits.
    """
    mask = os.sched_getaffinity(0)
    return min(len(mask) / _sharers(mask, local_size), _quota(cgroup) / local_size)


def _sharers(mask: set[int], local_size: int) -> int:
    """How many ranks may use a core of this one's. Open MPI and Slurm bind ranks to cores of their own. Where the ranks
    are children of one launcher, each sees to which; elsewhere, all of a host count."""
    masks = []
    for pid in _siblings():
        try:
            masks.append(os.sched_getaffinity(pid))
        except OSError:  # it has ended
            continue
    if len(masks) < local_size:
        return local_size
    return min(local_size, sum(not mask.isdisjoint(one) for one in masks))


def _siblings() -> list[int]:
    """The processes that this one's parent has started, this one among them; none where the kernel does not tell."""
    parent = os.getppid()
    try:
        return list(map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split()))
    except (OSError, ValueError):
        return []


@lru_cache(1)  # once in a process
def warn_of_polling() -> None:
    """Warns in Open MPI's first process, if it was not told whether to yield: on a rank's only core its polling takes
    about a third of a step."""
    if os.environ.get("OMPI_COMM_WORLD_RANK") == "0" and YIELDS not in os.environ:
        _log.warning(POLLS)


def _quota(cgroup: Path) -> float:
    """Cores' worth of time that the container may use; infinite where it has no limit."""
    for name, period_name in (("cpu.max", None), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # versions 2 and 1
        try:
            words = (cgroup / name).read_text().split()
            words += (cgroup / period_name).read_text().split() if period_name else []
            quota, period = int(words[0]), int(words[1])
        except (OSError, ValueError, IndexError):  # not there, or "max"
            continue
        if quota > 0 and period > 0:
            return quota / period
    return float("inf")
