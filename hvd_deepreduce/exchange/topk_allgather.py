"""TopkA: every rank gets every rank's elements as key-value pairs, and sums them itself.

Renggli, Ashkboos, Aghagolzadeh, Alistarh, Hoefler, "SparCML", SC 2019; the rival of DenseStream's table II. For P ranks
with k kept elements each: ceil(log2 P) rounds of recursive doubling, (P - 1) k pairs received a rank, whatever their
overlap.
"""

from __future__ import annotations

from collections.abc import Callable

from mpi4py import MPI

from hvd_deepreduce.codec import U8, Floats
from hvd_deepreduce.exchange.channel import TIMEOUT, Program, Session, Traffic, gather
from hvd_deepreduce.joint.densestream import PAIRS, Stream, pack, unpack
from hvd_deepreduce.ops import arrays
from hvd_deepreduce.sparse import SparseTensor


def allreduce(
    comm: MPI.Comm,
    tensor: SparseTensor | Floats,
    *,
    dense: bool = False,
    out: Floats | None = None,
    scale: float = 1.0,
    residual: Floats | None = None,
    timeout: float = TIMEOUT,
) -> SparseTensor | Floats:
    """The sum of all ranks' tensors, added in rank order on every rank; arguments as ``densestream.allreduce``."""
    with Session(comm, tensor, "topk_allgather", dense or out is not None, out, scale, residual, timeout) as session:
        own, total = session.tensor, session.total
        streams: list[Stream | None] = [None] * session.traffic.size

        def deliver(rank: int, section: U8) -> None:
            try:
                streams[rank] = unpack(section, own.numel, own.values.dtype)
            except ValueError as error:
                raise ValueError(f"the pairs of rank {rank} cannot be read: {error}") from None

        def value() -> SparseTensor | Floats:
            parts = [stream for stream in streams if stream is not None]
            if total.out is not None:
                arrays.sum_into(total.out, [(part.indices(), part.values) for part in parts], scale)
                return total.out
            merged = parts[0]
            for part in parts[1:]:
                merged = merged.merge(part, 0)
            total.put(merged, 0, own.numel)
            return total.value()

        result = session.finish([program(session.traffic, own, deliver)], value)
        if residual is not None:
            arrays.subtract_sent(residual, own.indices, own.values)
        return result


def program(traffic: Traffic, tensor: SparseTensor, deliver: Callable[[int, U8], None]) -> Program:
    """The one program of a rank."""
    return gather(traffic, 0, pack(Stream.pairs(tensor), PAIRS), deliver)
