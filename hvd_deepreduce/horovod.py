"""What Horovod's collectives have in common in all frameworks."""

from __future__ import annotations

from typing import Any

from hvd_deepreduce.codec import U8
from hvd_deepreduce.engine import Collectives

# Horovod shows the name of an operation that stalls.
HINT = "if it stalls: was DeepReduce given the optimizer's process_set?"


class HorovodCollectives(Collectives):
    """The ranks of a process set; a subclass adds the framework's allgather.

    Args:
        hvd: ``horovod.torch`` or ``horovod.tensorflow``.
        process_set: of the ranks that take part.
    """

    def __init__(self, hvd: Any, process_set: Any) -> None:
        self._hvd = hvd
        self.process_set = process_set

    def rank(self) -> int:
        """This rank's number in the process set."""
        return int(self.process_set.rank())

    def size(self) -> int:
        """The process set's size."""
        return int(self.process_set.size())

    def local_size(self) -> int:
        """Number of ranks on this machine."""
        return int(self._hvd.local_size())

    def mpi_enabled(self) -> bool:
        """Whether Horovod runs on MPI, not on Gloo."""
        return bool(self._hvd.mpi_enabled())

    def allgather(self, data: U8, name: str) -> U8:
        """As ``Collectives.allgather``, under a name that explains a stall."""
        return super().allgather(data, f"{name} ({HINT})")
