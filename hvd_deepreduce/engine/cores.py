"""The cores that a rank really has."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def of_rank(local_size: int, cgroup: Path = CGROUP) -> int:
    """The cores of each of ``local_size`` ranks that share this process's cores; at least 1.

    They are those that the scheduler lets the process use, and no more than the time that a container is granted
    (``docker run --cpus``): threads beyond it would only wait for each other.

    Args:
        cgroup: where the kernel describes the container's limits.
    """
    return max(1, int(min(len(os.sched_getaffinity(0)), _quota(cgroup)) // local_size))


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
