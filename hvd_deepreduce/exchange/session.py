"""One allreduce over MPI, from the ranks' first message to their agreement that it succeeded."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from hvd_deepreduce.codec import Floats
from hvd_deepreduce.exchange.errors import ExchangeError, LostRankError
from hvd_deepreduce.exchange.mpi_transport import U64, MPITransport, PrivateComm
from hvd_deepreduce.exchange.sum_buffer import SumBuffer
from hvd_deepreduce.exchange.transport import DEFAULT_TIMEOUT, Program
from hvd_deepreduce.joint.stream import Stream
from hvd_deepreduce.sparse import DTYPE_IDS, SparseTensor

MAX_TEXT = 400
"""Bytes of a rank's error that the other ranks see."""


def bytes_sent(comm: MPI.Intracomm) -> int:
    """The bytes that this rank has sent in all sessions over this communicator."""
    return PrivateComm.of(comm, DEFAULT_TIMEOUT).bytes_sent


class Session:
    """One allreduce, as a context manager, entered by all ranks of a communicator::

        with Session(comm, tensor, description, ...) as session:      meeting
            programs = [...]                                          may use session.sum
            result = session.run(programs, session.sum_buffer.result) messages, then agreement

    - *Meeting*: one small MPI allreduce compares what the ranks bring.
    - *Messages*: the programs run over an ``MPITransport``.
    - *Agreement*: one number tells all ranks whether any of them has failed.

    Args:
        comm: an intracommunicator. The session uses a duplicate of it (``PrivateComm``).
        tensor: this rank's sparse tensor, or a dense vector, of which the nonzero elements are taken.
        description: the algorithm and all settings that must be equal on all ranks, as a text.
        dense: whether the sum is a dense array.
        out: the array to write the dense sum to, ``[numel]``; or None.
        scale: a factor for the sum.
        residual: the array that the caller subtracts from, ``[numel]``, or None; it is only checked.
        timeout: seconds without any message after which a rank counts as lost.

    Attributes:
        tensor: this rank's tensor, as a ``SparseTensor``.
        transport: for the programs.
        sum_buffer: for the programs' results.
        max_kept: the largest number of kept elements on any rank.

    Raises:
        ExchangeError: on entry, on all ranks: numbers of elements, dtypes or descriptions differ, or an argument of a
            rank is invalid.
        LostRankError: on entry: not all ranks entered within the timeout, or an earlier session was aborted.
        TypeError: ``comm`` is not an intracommunicator.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        tensor: SparseTensor | Floats,
        description: str,
        *,
        dense: bool,
        out: Floats | None,
        scale: float,
        residual: Floats | None,
        timeout: float,
    ) -> None:
        self.comm = PrivateComm.of(comm, timeout)
        self.description = description
        self.dense, self.out, self.scale = dense, out, scale
        self.failure = None
        try:
            self.tensor = _validated(tensor, out, residual)
        except (ValueError, TypeError) as error:
            self.failure = str(error)
            self.tensor = SparseTensor(0, np.empty(0, np.uint32), np.empty(0, np.float32))

    def __enter__(self) -> Session:
        self.comm.lock.acquire()
        try:
            if self.comm.abandoned is not None:
                raise LostRankError(
                    "an earlier exchange over this communicator was aborted because a rank was lost: "
                    "create a new communicator of the remaining ranks"
                )
            self._meet()
        except BaseException:
            self.comm.lock.release()
            raise
        self.transport = MPITransport(self.comm)
        self.sum_buffer = SumBuffer(self.tensor.numel, self.tensor.values.dtype, self.dense, self.out, self.scale)
        return self

    def __exit__(self, *_: object) -> None:
        self.comm.lock.release()

    def _meet(self) -> None:
        """Compares what the ranks bring. The maximum of a number and of its complement are complements of each other
        only if the number is the same on all ranks, so one allreduce with MAX is enough."""
        tensor = self.tensor
        same = np.array(
            [tensor.numel, DTYPE_IDS[tensor.values.dtype], zlib.crc32(self.description.encode())], np.uint64
        )
        own = np.array([self.failure is not None, tensor.indices.size], np.uint64)
        largest = self.comm.allreduce(np.concatenate([own, same, ~same]), MPI.MAX)
        if largest[0]:
            self._agree(self.failure)
        if np.any(largest[2:5] != ~largest[5:8]):
            texts = self._gather_texts(f"{self.description}, {tensor.numel} elements of {tensor.values.dtype}")
            groups: dict[str, list[int]] = {}
            for rank, text in enumerate(texts):
                groups.setdefault(text, []).append(rank)
            sides = (f"{', '.join(map(str, ranks))}: {text}" for text, ranks in groups.items())
            raise ExchangeError(
                f"the ranks' tensors or settings differ, and must be the same; ranks {'; ranks '.join(sides)}"
            )
        self.max_kept = int(largest[1])

    def sum(self, values: U64) -> U64:
        """The sum over all ranks of a few numbers, uint64 ``[n]``, the same ``n`` on all ranks."""
        return self.comm.allreduce(values, MPI.SUM)

    def run(self, programs: list[Program], result: Callable[[], SparseTensor | Floats]) -> SparseTensor | Floats:
        """Runs the programs, and returns ``result()`` once all ranks have succeeded.

        Raises:
            ExchangeError: on all ranks: a program or ``result`` failed on at least one.
            LostRankError: no message came within the timeout, or MPI reports an error.
        """
        self.transport.run(programs)
        total = self.transport.attempt(None, result)
        self._agree(self.transport.failure)
        assert total is not None
        return total

    def _agree(self, failure: str | None) -> None:
        """Raises ``ExchangeError`` on all ranks if one has failed. ``failure`` is a ``Transport.failure``."""
        if self.comm.allreduce(np.array([failure is not None], np.uint64), MPI.MAX)[0]:
            texts = self._gather_texts(failure or "")
            raise ExchangeError("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text))

    def _gather_texts(self, text: str) -> list[str]:
        """Every rank's text, cut at ``MAX_TEXT`` bytes."""
        own = np.frombuffer(text.encode()[:MAX_TEXT].ljust(MAX_TEXT, b"\0"), np.uint8).copy()
        return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in self.comm.allgather(own)]


def _validated(tensor: SparseTensor | Floats, out: Floats | None, residual: Floats | None) -> SparseTensor:
    """The tensor as a ``SparseTensor``, once all three arguments have been found to fit together."""
    if isinstance(tensor, np.ndarray):
        if tensor.ndim != 1 or tensor.dtype not in DTYPE_IDS:
            raise ValueError(
                f"tensor is {tensor.dtype}{list(tensor.shape)}; a dense vector must be float32 or float64 [N]"
            )
        tensor = Stream.from_dense(np.ascontiguousarray(tensor)).to_sparse()
    if not isinstance(tensor, SparseTensor):
        raise TypeError(f"tensor is a {type(tensor).__name__}; a SparseTensor or a NumPy array is required")
    for name, array in (("out", out), ("residual", residual)):
        if array is None:
            continue
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{name} is a {type(array).__name__}; a NumPy array or None is required")
        if array.dtype != tensor.values.dtype or array.shape != (tensor.numel,) or not array.flags.c_contiguous:
            raise ValueError(
                f"{name} is {array.dtype}{list(array.shape)}; "
                f"a contiguous {tensor.values.dtype}[{tensor.numel}] is required"
            )
    return tensor
