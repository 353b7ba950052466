"""SparCML's sparse allreduce (TopkDA in the DenseStream paper): key-value pairs, or dense ranges where shorter.

Renggli, Ashkboos, Aghagolzadeh, Alistarh, Hoefler, "SparCML: high-performance sparse communication for machine
learning", SC 2019, section 5. Two algorithms, for P ranks with k kept elements each:

``split_allgather``
    The vector is divided into P ranges of equal length, one per rank. Every rank sends each owner its pairs, an owner
    sums its range, and recursive doubling brings all ranges to all ranks. A rank receives between 2 (P - 1) / P k and
    P k pairs::

        split       rank i  -- pairs of range j -->  rank j     P - 1 messages
        sum         rank j adds all pairs of range j
        allgather   rank j  -- sum of range j -->    all        ceil(log2 P) messages, recursive doubling

``recursive_doubling``
    In round t, ranks at distance 2^t exchange and add everything that they have. For small vectors, where the number of
    messages costs more than their bytes: ceil(log2 P) messages, and between log2(P) k and (P - 1) k pairs received per
    rank. Ranks beyond the largest power of two hand their pairs to another rank first, and get the sum at the end. For
    six ranks::

        hand in      4 --> 0    5 --> 1
        round 0      0 <-> 1    2 <-> 3
        round 1      0 <-> 2    1 <-> 3
        hand out     0 --> 4    1 --> 5

A range travels dense if its pairs would take at least as many bytes as its dense values: for float32, if at least half
of its elements are nonzero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from hvd_deepreduce.codecs.interfaces import U8, Floats, RngKey
from hvd_deepreduce.codecs.joint.stream import Stream
from hvd_deepreduce.codecs.joint.stream_format import PAIRS, PLAIN, check_kind, pack, unpack
from hvd_deepreduce.codecs.sparse_tensor import SparseTensor
from hvd_deepreduce.exchange.mpi.densestream import slice_count
from hvd_deepreduce.exchange.mpi.schedules import allgather
from hvd_deepreduce.exchange.mpi.sum_buffer import SumBuffer
from hvd_deepreduce.exchange.mpi.transport import DEFAULT_TIMEOUT, EMPTY, Program, Receive, Transport, message_tag
from hvd_deepreduce.exchange.settings import SparCML
from hvd_deepreduce.exchange.traffic import Traffic

if TYPE_CHECKING:
    from mpi4py import MPI

SMALL = 8192
"""``auto`` is recursive doubling for up to this many kept elements (64 KiB of pairs)."""
SPLIT, ALLGATHER = 0, 1
"""The phases of split-allgather's message tags."""
HAND_IN, HAND_OUT, FIRST_ROUND = 0, 1, 2
"""The phases of recursive doubling's message tags; round t is phase ``FIRST_ROUND`` + t."""

Algorithm = Literal["auto", "split_allgather", "recursive_doubling"]


def allreduce(
    comm: MPI.Intracomm,
    tensor: SparseTensor | Floats,
    *,
    dense: bool = False,
    out: Floats | None = None,
    scale: float = 1.0,
    residual: Floats | None = None,
    algorithm: Algorithm = "auto",
    key: RngKey = RngKey(0, 0, 0),  # noqa: B008  (an immutable tuple)
    timeout: float = DEFAULT_TIMEOUT,
    patience: float | None = None,
) -> SparseTensor | Floats:
    """The sum of all ranks' tensors, bitwise the same on every rank. Collective.

    Arguments, result and errors are those of ``densestream.allreduce``; nothing is rounded. And:

    Args:
        algorithm: ``split_allgather``, ``recursive_doubling``, or ``auto``: recursive doubling for small vectors.
    """
    from hvd_deepreduce.exchange.mpi.session import Session  # needs mpi4py; the programs below do not

    def prepare(own: SparseTensor) -> SparseTensor:
        if algorithm not in get_args(Algorithm):
            raise ValueError(f"algorithm is {algorithm!r}; allowed are {', '.join(get_args(Algorithm))}")
        return own

    with Session(
        comm, tensor, f"sparcml with algorithm {algorithm}", dense=dense, out=out, scale=scale, residual=residual,
        key=key, timeout=timeout, patience=patience, prepare=prepare,
    ) as session:  # fmt: skip
        transport, sum_buffer, own = session.transport, session.sum_buffer, session.tensor
        if algorithm == "recursive_doubling" or (algorithm == "auto" and session.max_kept <= SMALL):
            programs = [recursive_doubling(transport, own, sum_buffer)]
        else:
            programs = split_allgather(transport, own, slice_count(session.max_kept, transport.size), sum_buffer)
        return session.run(programs, sum_buffer.result)


def run_exchange(
    settings: SparCML,
    comm: MPI.Intracomm,
    tensor: SparseTensor | Floats,
    out: Floats,
    residual: Floats | None,
    key: RngKey,
) -> Traffic:
    """The exchange ``sparcml``; see ``settings.ExchangeFunction``. ``key`` has no effect: nothing is rounded."""
    from hvd_deepreduce.exchange.mpi.session import traffic_since

    before = traffic_since(comm)
    allreduce(comm, tensor, out=out, residual=residual, algorithm=settings.algorithm, key=key)
    return traffic_since(comm, before)


def pack_range(stream: Stream, begin: int, end: int) -> U8:
    """Packs the elements ``begin`` to ``end``: as pairs, or as one dense block where that is no longer (SparCML's
    switch)."""
    size = stream.values.itemsize
    if stream.values.size * (4 + size) < (end - begin) * size or end == begin:
        return pack(stream, PAIRS)
    values = np.empty(end - begin, stream.values.dtype)
    stream.write_dense(begin, values)
    starts, lengths = np.array([begin], np.uint32), np.array([end - begin], np.uint32)
    return pack(Stream(stream.numel, starts, lengths, values), PLAIN)


def unpack_range(section: U8, like: Stream, begin: int, end: int, sender: int) -> Stream:
    """What ``pack_range`` wrote on the rank ``sender``, for the vector of ``like``.

    Raises:
        ValueError: the section is damaged; the text names the sender.
    """
    try:
        check_kind(section, (PAIRS, PLAIN))
        return unpack(section, like.numel, like.values.dtype, None, begin, end)
    except ValueError as error:
        raise ValueError(f"cannot read the pairs of rank {sender}: {error}") from None


def split_allgather(
    transport: Transport, tensor: SparseTensor, slices: int, sum_buffer: SumBuffer | None
) -> list[Program]:
    """One rank's programs, one per slice of the ranges.

    Args:
        sum_buffer: receives the sum; None: the sum is not decoded (for counting messages in a simulation).
    """
    parts = transport.size * slices
    bounds = [tensor.numel * part // parts for part in range(parts + 1)]
    nothing = Stream.empty(tensor.numel, tensor.values.dtype)
    cuts = np.array(bounds[1:-1], np.uint64)
    pieces = transport.attempt([nothing] * parts, lambda: Stream.from_pairs(tensor).split(cuts))
    ranges = list(zip(bounds[:-1], bounds[1:], strict=True))
    return [
        _split_allgather(transport, slot, pieces[slot::slices], ranges[slot::slices], sum_buffer)
        for slot in range(slices)
    ]


def _split_allgather(
    transport: Transport,
    slot: int,
    pieces: list[Stream],
    ranges: list[tuple[int, int]],
    sum_buffer: SumBuffer | None,
) -> Program:
    """The program of one slice; ``pieces`` and ``ranges`` (begin, end) have one entry per owner."""
    rank, size = transport.rank, transport.size
    tag = message_tag(SPLIT, slot)
    for distance in range(1, size):
        to = (rank + distance) % size
        transport.send(to, tag, [transport.attempt(EMPTY, pack, pieces[to], PAIRS)])
    own_range = ranges[rank][1] - ranges[rank][0]
    stream = pieces[rank]
    for distance in range(1, size):
        source = (rank - distance) % size
        (message,) = yield Receive(source, tag, 1, own_range)
        received = transport.attempt(stream, unpack_range, message, stream, *ranges[rank], source)
        stream = transport.attempt(stream, stream.merge, received, 0)

    def elements(ranks: range) -> int:
        return sum(ranges[owner][1] - ranges[owner][0] for owner in ranks)

    def deliver(owner: int, section: U8) -> None:
        if sum_buffer is not None:
            sum_buffer.write_region([unpack_range(section, stream, *ranges[owner], owner)], *ranges[owner])

    section = transport.attempt(EMPTY, pack_range, stream, *ranges[rank])
    yield from allgather(transport, message_tag(ALLGATHER, slot), section, elements, deliver)


def recursive_doubling(transport: Transport, tensor: SparseTensor, sum_buffer: SumBuffer | None) -> Program:
    """A rank's only program. ``sum_buffer`` None: the sum is not decoded."""
    rank, numel = transport.rank, tensor.numel
    stream = transport.attempt(Stream.empty(numel, tensor.values.dtype), Stream.from_pairs, tensor)
    paired = 1 << (transport.size.bit_length() - 1)  # ranks from here on only hand in and get the sum
    hand_in, hand_out = message_tag(HAND_IN, 0), message_tag(HAND_OUT, 0)
    if rank >= paired:
        transport.send(rank - paired, hand_in, [transport.attempt(EMPTY, pack_range, stream, 0, numel)])
        (message,) = yield Receive(rank - paired, hand_out, 1, numel)
        stream = transport.attempt(stream, unpack_range, message, stream, 0, numel, rank - paired)
    else:
        helps = rank + paired < transport.size
        rounds = [(rank ^ 1 << t, message_tag(FIRST_ROUND + t, 0)) for t in range(paired.bit_length() - 1)]
        for partner, tag in ([(rank + paired, hand_in)] if helps else []) + rounds:
            if tag != hand_in:
                section = transport.attempt(EMPTY, pack_range, stream, 0, numel)
                transport.send(partner, tag, [section])
                stream = transport.attempt(stream, unpack_range, section, stream, 0, numel, rank)
            (message,) = yield Receive(partner, tag, 1, numel)
            received = transport.attempt(stream, unpack_range, message, stream, 0, numel, partner)
            # Both ranks add the same two streams, with the same blocks and in the same order: where both have NaN,
            # a + b and b + a have different bits.
            first, second = (stream, received) if rank < partner else (received, stream)
            stream = transport.attempt(stream, first.merge, second, 0)
        if helps:
            transport.send(rank + paired, hand_out, [transport.attempt(EMPTY, pack_range, stream, 0, numel)])
    if sum_buffer is not None:
        transport.attempt(None, sum_buffer.write_region, [stream], 0, numel)
