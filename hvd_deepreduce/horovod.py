"""What Horovod's collectives have in common in all frameworks."""

from __future__ import annotations

import os
from typing import Any

from hvd_deepreduce.codec import U8
from hvd_deepreduce.engine import Collectives

# Horovod shows the name of an operation that stalls.
HINT = "if it stalls: was DeepReduce given the optimizer's process_set?"

# How long a rank waits for the others at its first gradient.
HANDSHAKE_VARIABLE = "HVD_DEEPREDUCE_HANDSHAKE_SECONDS"
HANDSHAKE_SECONDS = 300.0
WARN_SECONDS = 20.0
NOBODY_CAME = (
    "this rank has waited {seconds} s at its first gradient, and not all other ranks of its process set have come. Do "
    "all ranks give compression=DeepReduce(...) to their optimizer or tape? Was DeepReduce given the optimizer's "
    "process_set? In an elastic job, is DeepReduce in the state that hvd.elastic.run gets? If a rank only takes long "
    f"before its first step, set the environment variable {HANDSHAKE_VARIABLE} to a larger limit, or to 0 for none"
)


def handshake_seconds() -> float:
    """The limit; 0: none.

    Raises:
        ValueError: the environment variable is not a number, or negative.
    """
    given = os.environ.get(HANDSHAKE_VARIABLE, "")
    try:
        seconds = float(given or HANDSHAKE_SECONDS)
    except ValueError:
        seconds = -1
    if not seconds >= 0:
        raise ValueError(f"{HANDSHAKE_VARIABLE} is {given!r}; it must be a number of seconds, or 0 for no limit")
    return seconds


class HorovodCollectives(Collectives):
    """The ranks of a process set; a subclass adds the framework's allgather.

    Args:
        hvd: ``horovod.torch`` or ``horovod.tensorflow``.
        process_set: of the ranks that take part.
    """

    def __init__(self, hvd: Any, process_set: Any) -> None:
        self._hvd = hvd
        self.process_set = process_set
        # That of all ranks is the same number, and is asked for often: hvd.size() answers ten times faster.
        self._ranks = hvd.size if process_set is hvd.global_process_set else process_set.size

    def rank(self) -> int:
        """This rank's number in the process set."""
        return int(self.process_set.rank())

    def size(self) -> int:
        """The process set's size."""
        return int(self._ranks())

    def local_size(self) -> int:
        """Number of ranks on this machine."""
        return int(self._hvd.local_size())

    def elastic(self) -> bool:
        """Whether the job was started by ``horovodrun`` with ``--host-discovery-script``."""
        return os.environ.get("HOROVOD_ELASTIC") == "1"

    def mpi_enabled(self) -> bool:
        """Whether Horovod runs on MPI, not on Gloo."""
        return bool(self._hvd.mpi_enabled())

    def allgather(self, data: U8, name: str) -> U8:
        """As ``Collectives.allgather``, under a name that explains a stall."""
        return super().allgather(data, f"{name} ({HINT})")
