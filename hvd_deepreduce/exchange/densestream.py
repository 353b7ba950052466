"""DenseStream's sparse allreduce (DSA).

Li, Chao, Liao, Lv, "DenseStream: a novel data representation for gradient sparsification in distributed synchronous
SGD algorithms", section III.B and algorithm 2. Three phases:

1. *Balanced split*: the vector is divided into one region per rank, with about equal shares of the kept elements.
2. *Scatter-reduce* by recursive halving: every rank gets the sum of its own region.
3. *Allgatherv* by recursive doubling: every rank gets all regions.

Each region is divided again into slices of about ``SLICE_ELEMENTS`` kept elements (ours). The slices with the same
number, one per region, belong to one program, so that one slice is merged while the next travels. For three ranks with
two slices each, ``bounds`` has seven entries::

    vector     |     region of rank 0    |     region of rank 1    |     region of rank 2    |
    slices     |   slot 0   |   slot 1   |   slot 0   |   slot 1   |   slot 0   |   slot 1   |
    bounds     0            1            2            3            4            5            6

For P ranks with k kept elements each, scatter-reduce and allgatherv take ceil(log2 P) messages per rank and slice each.
A rank receives between 2 (P - 1) / P k and ((log2 P / 2 + 1) P - 1) k elements, depending on how far the supports
overlap (equation 6).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hvd_deepreduce.codec import U8, Floats, RngKey
from hvd_deepreduce.exchange.schedules import allgather, halving_rounds
from hvd_deepreduce.exchange.settings import DenseStreamExchange
from hvd_deepreduce.exchange.sum_buffer import SumBuffer
from hvd_deepreduce.exchange.transport import (
    DEFAULT_TIMEOUT,
    EMPTY,
    MAX_SLICES,
    Program,
    Receive,
    Transport,
    message_tag,
)
from hvd_deepreduce.joint.densestream import DenseStream
from hvd_deepreduce.joint.stream import Stream, covered_indices
from hvd_deepreduce.joint.stream_format import pack, unpack, value_codec
from hvd_deepreduce.ops import arrays, deferred, densestream
from hvd_deepreduce.sparse import SparseTensor

if TYPE_CHECKING:
    from mpi4py import MPI

U64 = np.ndarray[Any, np.dtype[np.uint64]]
SLICE_ELEMENTS = 1 << 14
"""About the number of kept elements of a region that travel as one slice."""
PLAIN_BLOCKS = DenseStream(coded=False)
SCATTER_REDUCE, ALLGATHER = 0, 1
"""The phases of message tags."""


def allreduce(
    comm: MPI.Intracomm,
    tensor: SparseTensor | Floats,
    *,
    dense: bool = False,
    out: Floats | None = None,
    scale: float = 1.0,
    residual: Floats | None = None,
    fill: bool = False,
    codec: DenseStream = PLAIN_BLOCKS,
    key: RngKey = RngKey(0, 0, 0),  # noqa: B008  (an immutable tuple)
    timeout: float = DEFAULT_TIMEOUT,
) -> SparseTensor | Floats:
    """The sum of all ranks' tensors, bitwise the same on every rank. Collective: every rank of ``comm`` calls it.

    Args:
        comm: an mpi4py intracommunicator. The allreduce uses a duplicate of it, made at the first call.
        tensor: what this rank sends: a sparse tensor, or a dense vector float32 or float64 ``[numel]``, of which the
            nonzero elements are sent.
        dense: return the sum as a dense array instead of a sparse tensor of its nonzero elements.
        out: where to write the dense sum: contiguous, ``[numel]``, of the tensor's dtype. Undefined after an error.
        scale: a factor for the sum; 1 / ranks gives the mean. It is not applied to the residual.
        residual: the accumulated gradient from which ``tensor`` was selected: contiguous, ``[numel]``, of the tensor's
            dtype. What was sent is subtracted from it, and the rounding errors of lossy values on this rank, those of
            partial sums included, are added to it: over all ranks, sum + residuals after = residuals before, to
            floating-point rounding. Unchanged after an error.
        fill: send the residual's values in place of zeros inside blocks, at no cost in bytes (proposed at the end of
            section IV.B). Each rank may choose.
        codec: how streams are packed: plain blocks as in the paper, or coded, and with which value codec.
        key: the randomness of value codecs that round at random.
        timeout: seconds without any message after which a rank counts as lost.

    Returns:
        A ``SparseTensor``; with ``dense`` or ``out`` an array ``[numel]``, which is ``out`` if that was given.

    Raises:
        ExchangeError: a ``ValueError``, on all ranks: tensors, arguments or settings do not fit together, or a message
            is damaged.
        LostRankError: a rank died, or sent nothing within the timeout.
        ValueError: ``fill`` without ``residual``.
        TypeError: ``comm`` is not an intracommunicator.
    """
    from hvd_deepreduce.exchange.session import Session  # needs mpi4py; the programs below do not

    if fill and residual is None:
        raise ValueError("fill is True and residual is None: fill sends the residual's values, so pass residual too")
    description = f"densestream with {codec!r}"
    with Session(
        comm, tensor, description, dense=dense or out is not None, out=out, scale=scale, residual=residual,
        timeout=timeout,
    ) as session:  # fmt: skip
        own, transport = session.tensor, session.transport
        gap = codec.gap(own.numel, own.values.dtype)
        if fill and residual is not None:
            indices = covered_indices(own.indices, gap)
            own = SparseTensor(own.numel, indices, arrays.gather(residual, indices))
        slices = slice_count(session.max_kept, transport.size)
        bounds = average_boundaries(session.sum(share_boundaries(own, transport.size * slices)), own.numel)
        errors: list[Stream] | None = [] if residual is not None and codec.value != "raw" else None
        plan = Plan(codec, own.numel, own.values.dtype, bounds, slices, key._replace(rank=transport.rank), errors)
        work = programs(transport, Stream.from_sparse(own, gap), plan, session.sum_buffer)
        total = session.run(work, session.sum_buffer.result)
        if residual is not None:
            arrays.subtract_sent(residual, own.indices, own.values)
            for error in errors or []:
                densestream.add_to(error.starts, error.lengths, error.values, residual)
        return total


def run_exchange(
    settings: DenseStreamExchange,
    comm: MPI.Intracomm,
    tensor: SparseTensor | Floats,
    out: Floats,
    residual: Floats | None,
    key: RngKey,
) -> int:
    """The exchange ``densestream``; see ``settings.ExchangeFunction``."""
    from hvd_deepreduce.exchange.session import bytes_sent

    before = bytes_sent(comm)
    codec = DenseStream(coded=settings.coded, value=settings.value, bits=settings.bits)
    fill = settings.fill and residual is not None  # None: no error feedback, or this tensor is not finite
    allreduce(comm, tensor, out=out, residual=residual, fill=fill, codec=codec, key=key)
    return bytes_sent(comm) - before


def slice_count(max_kept: int, ranks: int) -> int:
    """The number of slices per region, if no rank keeps more than ``max_kept`` elements."""
    return max(1, min(MAX_SLICES, max_kept // (max(ranks, 1) * SLICE_ELEMENTS)))


def share_boundaries(tensor: SparseTensor, parts: int) -> U64:
    """One rank's contribution to the balanced split.

    Returns:
        uint64 ``[parts]``: the indices where the second to the last of ``parts`` equal shares of the kept elements
        begin, and 1, the number of ranks that contribute. All zeros for a rank that keeps no element.
    """
    kept = tensor.indices.size
    own = np.zeros(parts, np.uint64)
    if kept:
        own[:-1] = tensor.indices[np.arange(1, parts, dtype=np.uint64) * np.uint64(kept) // np.uint64(parts)]
        own[-1] = 1
    return own


def average_boundaries(totals: U64, numel: int) -> list[int]:
    """The ``parts + 1`` boundaries that all ranks use: the mean over the contributing ranks, or equal parts if no rank
    contributes.

    Args:
        totals: uint64 ``[parts]``: the sum of all ranks' ``share_boundaries``.
    """
    parts = totals.size
    ranks = int(totals[-1])
    if ranks:
        inner = (totals[:-1] // np.uint64(ranks)).tolist()
    else:
        inner = [numel * part // parts for part in range(1, parts)]
    return [0, *inner, numel]


class Plan:
    """What the programs of one allreduce share: the boundaries of regions and slices, and how streams are packed.

    Args:
        codec: how streams are packed.
        numel, dtype: of the vector.
        bounds: the boundaries of all slices, ``[ranks * slices + 1]``; see the drawing above.
        slices: the number of slices per region.
        key: the randomness of the value codec.
        errors: a list that receives the rounding errors of all packed streams; None: they are not computed.
    """

    def __init__(
        self,
        codec: DenseStream,
        numel: int,
        dtype: np.dtype[Any],
        bounds: list[int],
        slices: int,
        key: RngKey,
        errors: list[Stream] | None,
    ) -> None:
        self.form, self.gap = codec.form, codec.gap(numel, dtype)
        self.values = value_codec(codec.value, codec.bits)
        self.numel, self.dtype, self.bounds, self.slices = numel, dtype, bounds, slices
        self.key, self.errors, self.packed = key, errors, 0

    def element_range(self, ranks: range, slot: int) -> tuple[int, int]:
        """The elements (begin, end) from the slice ``slot`` of the first of ``ranks`` to that of the last."""
        return self.bounds[ranks[0] * self.slices + slot], self.bounds[ranks[-1] * self.slices + slot + 1]

    def pack(self, stream: Stream, ranks: range, slot: int) -> U8:
        """Packs a stream of the slices ``slot`` of ``ranks``, and records its rounding errors."""
        begin, end = self.element_range(ranks, slot)
        self.packed += 1  # every stream of this rank is rounded with random numbers of its own
        key = self.key._replace(parameter=(self.key.parameter + self.packed * 0x9E3779B1) & 0xFFFFFFFF)
        section = pack(stream, self.form, self.values, key, begin, end)
        if self.errors is not None and deferred.finite(stream.values):
            sent = unpack(section, self.numel, self.dtype, None, begin, end)
            self.errors.append(Stream(self.numel, stream.starts, stream.lengths, stream.values - sent.values))
        return section

    def unpack(self, section: U8, ranks: range, slot: int, sender: int) -> Stream:
        """What ``pack`` wrote on the rank ``sender``.

        Raises:
            ValueError: the section is damaged; the text names the sender.
        """
        try:
            return unpack(section, self.numel, self.dtype, None, *self.element_range(ranks, slot))
        except ValueError as error:
            raise ValueError(f"cannot read the stream of rank {sender}: {error}") from None


def programs(transport: Transport, stream: Stream, plan: Plan, sum_buffer: SumBuffer | None) -> list[Program]:
    """One rank's programs, one per slice.

    Args:
        stream: this rank's vector, with blocks of ``plan.gap``.
        sum_buffer: receives the sum; None: the sum is not decoded (for counting messages in a simulation).
    """
    pieces = stream.split(np.array(plan.bounds[1:-1], np.uint64))
    return [
        _program(transport, slot, Stream.concatenate(pieces[slot :: plan.slices]), plan, sum_buffer)
        for slot in range(plan.slices)
    ]


def _program(transport: Transport, slot: int, stream: Stream, plan: Plan, sum_buffer: SumBuffer | None) -> Program:
    tag = message_tag(SCATTER_REDUCE, slot)
    for halving in halving_rounds(transport.rank, transport.size):
        cut = plan.bounds[halving.middle * plan.slices + slot]
        left, right = stream.split(np.array([cut], np.uint64))
        stream, given = (left, right) if halving.own_half[0] < halving.middle else (right, left)
        section = transport.attempt(EMPTY, plan.pack, given, halving.other_half, slot)
        for to in halving.send_to:
            transport.send(to, tag, [section])
        for source in halving.receive_from:
            (message,) = yield Receive(source, tag, 1)
            received = transport.attempt(stream, plan.unpack, message, halving.own_half, slot, source)
            stream = transport.attempt(stream, stream.merge, received, plan.gap)

    def deliver(rank: int, section: U8) -> None:
        region = range(rank, rank + 1)
        if sum_buffer is not None:
            sum_buffer.write_region(plan.unpack(section, region, slot, rank), *plan.element_range(region, slot))

    own = range(transport.rank, transport.rank + 1)
    section = transport.attempt(EMPTY, plan.pack, stream, own, slot)
    yield from allgather(transport, message_tag(ALLGATHER, slot), section, deliver)
