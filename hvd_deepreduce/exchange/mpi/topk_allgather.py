"""TopkA: every rank gets every rank's elements as key-value pairs, and sums them itself.

Renggli, Ashkboos, Aghagolzadeh, Alistarh, Hoefler, "SparCML: high-performance sparse communication for machine
learning", SC 2019; compared with DenseStream in that paper's table II. For P ranks with k kept elements each:
ceil(log2 P) messages per rank, by recursive doubling (``schedules``), and (P - 1) k pairs received per rank, whatever
the overlap of the supports.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hvd_deepreduce.codecs.interfaces import U8, Floats, RngKey
from hvd_deepreduce.codecs.joint.stream import Stream
from hvd_deepreduce.codecs.joint.stream_format import PAIRS, check_kind, pack, unpack
from hvd_deepreduce.codecs.sparse_tensor import SparseTensor
from hvd_deepreduce.exchange.mpi.schedules import allgather
from hvd_deepreduce.exchange.mpi.transport import DEFAULT_TIMEOUT, EMPTY, Program, Transport, message_tag
from hvd_deepreduce.exchange.settings import TopKAllGather
from hvd_deepreduce.exchange.traffic import Traffic

if TYPE_CHECKING:
    from mpi4py import MPI


def allreduce(
    comm: MPI.Intracomm,
    tensor: SparseTensor | Floats,
    *,
    dense: bool = False,
    out: Floats | None = None,
    scale: float = 1.0,
    residual: Floats | None = None,
    key: RngKey = RngKey(0, 0, 0),  # noqa: B008  (an immutable tuple)
    timeout: float = DEFAULT_TIMEOUT,
    patience: float | None = None,
) -> SparseTensor | Floats:
    """The sum of all ranks' tensors, added in rank order, bitwise the same on every rank. Collective.

    Arguments, result and errors are those of ``densestream.allreduce``; nothing is rounded."""
    from hvd_deepreduce.exchange.mpi.session import Session  # needs mpi4py; the program below does not

    with Session(
        comm, tensor, "topk_allgather", dense=dense, out=out, scale=scale, residual=residual, key=key,
        timeout=timeout, patience=patience,
    ) as session:  # fmt: skip
        own, sum_buffer = session.tensor, session.sum_buffer
        streams: list[Stream | None] = [None] * session.transport.size

        def deliver(rank: int, section: U8) -> None:
            try:
                check_kind(section, (PAIRS,))
                streams[rank] = unpack(section, own.numel, own.values.dtype)
            except ValueError as error:
                raise ValueError(f"cannot read the pairs of rank {rank}: {error}") from None

        def result() -> SparseTensor | Floats:
            sum_buffer.write_region([stream for stream in streams if stream is not None], 0, own.numel)
            return sum_buffer.result()

        return session.run([program(session.transport, own, deliver)], result)


def run_exchange(
    settings: TopKAllGather,
    comm: MPI.Intracomm,
    tensor: SparseTensor | Floats,
    out: Floats,
    residual: Floats | None,
    key: RngKey,
) -> Traffic:
    """The exchange ``topk_allgather``; see ``settings.ExchangeFunction``. Nothing is rounded."""
    from hvd_deepreduce.exchange.mpi.session import traffic_since

    before = traffic_since(comm)
    allreduce(comm, tensor, out=out, residual=residual, key=key)
    return traffic_since(comm, before)


def program(transport: Transport, tensor: SparseTensor, deliver: Callable[[int, U8], None]) -> Program:
    """A rank's only program: ``deliver(rank, section)`` gets every rank's packed pairs."""
    section = transport.attempt(EMPTY, lambda: pack(Stream.from_pairs(tensor), PAIRS))
    return allgather(transport, message_tag(0, 0), section, lambda ranks: len(ranks) * tensor.numel, deliver)
