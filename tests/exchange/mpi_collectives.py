"""The engine's collectives over an mpi4py communicator: real ranks without a framework."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from hvd_deepreduce.engine import Collectives


class MPICollectives(Collectives):
    """The ranks of ``comm``, in its order. Allgathers are started in the same order on all ranks."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm

    def rank(self) -> int:
        return self.comm.rank

    def size(self) -> int:
        return self.comm.size

    def local_size(self) -> int:
        return self.comm.size

    def start_allgather(self, data: np.ndarray, name: str) -> list[bytes]:
        return self.comm.allgather((name, data.tobytes()))

    def wait_allgather(self, pending: list[tuple[str, bytes]]) -> np.ndarray:
        names = {name for name, _ in pending}
        assert len(names) == 1, names
        return np.frombuffer(bytearray(b"".join(data for _, data in pending)), np.uint8)

    def mpi_enabled(self) -> bool:
        return True
