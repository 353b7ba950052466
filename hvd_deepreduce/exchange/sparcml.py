"""TopkDA: SparCML's dynamic sparse allreduce, on key-value pairs that become a dense array where they grow too many.

Renggli, Ashkboos, Aghagolzadeh, Alistarh, Hoefler, "SparCML: high-performance sparse communication for machine
learning", SC 2019, section 5. Two algorithms, for P ranks with k kept elements each:

- ``split_allgather``: the vector in P equal ranges; every rank sends each owner its pairs (P - 1 messages), an owner
  sums its range, and recursive doubling hands the ranges to all. A range of which at least half (for float32) is not
  zero travels dense. Between 2 (P - 1) / P k and P k pairs received a rank.
- ``recursive_doubling``: in round t, ranks 2^t apart exchange and add all that they have; ceil(log2 P) messages,
  between log2(P) k and (P - 1) k pairs. For small vectors, where messages cost more than bytes. Of ranks beyond a
  power of two, each first hands its pairs to another, and gets the sum at the end.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from mpi4py import MPI

from hvd_deepreduce.codec import U8, Floats
from hvd_deepreduce.exchange.channel import EMPTY, SLOTS, TIMEOUT, Program, Session, Total, Traffic, gather
from hvd_deepreduce.exchange.densestream import slices_of
from hvd_deepreduce.joint.densestream import PAIRS, PLAIN, Stream, pack, unpack
from hvd_deepreduce.ops import arrays
from hvd_deepreduce.sparse import SparseTensor

SMALL = 8192
"""Up to so many kept elements (64 KiB of pairs), ``auto`` is recursive doubling."""

Algorithm = Literal["auto", "split_allgather", "recursive_doubling"]


def allreduce(
    comm: MPI.Comm,
    tensor: SparseTensor | Floats,
    *,
    dense: bool = False,
    out: Floats | None = None,
    scale: float = 1.0,
    residual: Floats | None = None,
    algorithm: Algorithm = "auto",
    timeout: float = TIMEOUT,
) -> SparseTensor | Floats:
    """The sum of all ranks' tensors, bitwise the same on every rank; arguments as ``densestream.allreduce``.

    Args:
        algorithm: ``auto`` takes recursive doubling for small vectors, split-allgather for others.
    """
    settings = f"sparcml with algorithm {algorithm}"
    with Session(comm, tensor, settings, dense or out is not None, out, scale, residual, timeout) as session:
        traffic, total, own = session.traffic, session.total, session.tensor
        if algorithm == "recursive_doubling" or (algorithm == "auto" and session.most <= SMALL):
            programs = [recursive_doubling(traffic, own, total)]
        else:
            programs = split_allgather(traffic, own, slices_of(session.most, traffic.size), total)
        result = session.finish(programs, total.value)
        if residual is not None:
            arrays.subtract_sent(residual, own.indices, own.values)
        return result


def write(stream: Stream, begin: int, end: int) -> U8:
    """The elements from ``begin`` to ``end`` as pairs, or dense where that is shorter: SparCML's switch."""
    size = stream.values.itemsize
    if stream.values.size * (4 + size) < (end - begin) * size or end == begin:
        return pack(stream, PAIRS)
    values = np.empty(end - begin, stream.values.dtype)
    stream.dense(begin, values)
    one = np.array([begin], np.uint32), np.array([end - begin], np.uint32)
    return pack(Stream(stream.numel, *one, values), PLAIN)


def read(section: U8, like: Stream, begin: int, end: int, sender: int) -> Stream:
    """What ``write`` wrote on another rank."""
    try:
        return unpack(section, like.numel, like.values.dtype, None, begin, end)
    except ValueError as error:
        raise ValueError(f"the pairs of rank {sender} cannot be read: {error}") from None


def split_allgather(traffic: Traffic, tensor: SparseTensor, slices: int, total: Total | None) -> list[Program]:
    """A program for each slice of the ranges."""
    parts = traffic.size * slices
    bounds = [tensor.numel * part // parts for part in range(parts + 1)]
    pieces = Stream.pairs(tensor).split(np.array(bounds[1:-1], np.uint64))
    reach = list(zip(bounds[:-1], bounds[1:], strict=True))
    return [_split_allgather(traffic, slot, pieces[slot::slices], reach[slot::slices], total) for slot in range(slices)]


def _split_allgather(
    traffic: Traffic, slot: int, pieces: list[Stream], reach: list[tuple[int, int]], total: Total | None
) -> Program:
    rank, size = traffic.rank, traffic.size
    for distance in range(1, size):
        to = (rank + distance) % size
        traffic.send(to, slot, [pack(pieces[to], PAIRS)])
    stream = pieces[rank]
    for distance in range(1, size):
        source = (rank - distance) % size
        (message,) = yield source, slot, 1
        theirs = traffic.attempt(stream, read, message, stream, *reach[rank], source)
        stream = traffic.attempt(stream, stream.merge, theirs, 0)

    def deliver(owner: int, section: U8) -> None:
        if total is not None:
            total.put(read(section, stream, *reach[owner], owner), *reach[owner])

    section = traffic.attempt(EMPTY, write, stream, *reach[rank])
    yield from gather(traffic, SLOTS + slot, section, deliver)


def recursive_doubling(traffic: Traffic, tensor: SparseTensor, total: Total | None) -> Program:
    """The one program of a rank."""
    rank, numel = traffic.rank, tensor.numel
    stream = Stream.pairs(tensor)
    paired = 1 << (traffic.size.bit_length() - 1)  # the ranks from here on only hand in and take out
    if rank >= paired:
        traffic.send(rank - paired, 0, [write(stream, 0, numel)])
        (message,) = yield rank - paired, SLOTS, 1
        stream = traffic.attempt(stream, read, message, stream, 0, numel, rank - paired)
    else:
        helped = rank + paired < traffic.size
        rounds = [(rank ^ 1 << t, (2 + t) * SLOTS) for t in range(paired.bit_length() - 1)]
        for partner, tag in ([(rank + paired, 0)] if helped else []) + rounds:
            if tag:
                traffic.send(partner, tag, [traffic.attempt(EMPTY, write, stream, 0, numel)])
            (message,) = yield partner, tag, 1
            theirs = traffic.attempt(stream, read, message, stream, 0, numel, partner)
            stream = traffic.attempt(stream, stream.merge, theirs, 0)
        if helped:
            traffic.send(rank + paired, SLOTS, [traffic.attempt(EMPTY, write, stream, 0, numel)])
    if total is not None:
        traffic.attempt(None, total.put, stream, 0, numel)
