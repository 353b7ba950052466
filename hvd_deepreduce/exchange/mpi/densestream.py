"""DenseStream's sparse allreduce (DSA).

Li, Chao, Liao, Lv, "DenseStream: a novel data representation for gradient sparsification in distributed synchronous
SGD algorithms", section III.B and algorithm 2. Three phases:

1. *Balanced split*: the vector is divided into one region per rank, with about equal shares of the kept elements. The
   paper averages the ranks' own boundaries; ours are those of the sum of their histograms (``balance.py``), since where
   half of the ranks keep the front and half the back, the averages divide what nobody keeps.
2. *Scatter-reduce* by recursive halving: every rank gets the sum of its own region.
3. *Allgatherv* by recursive doubling: every rank gets all regions.

Each region is divided again into slices of ``SLICE_ELEMENTS`` kept elements or more (ours). The slices with the same
number, one per region, belong to one program, so that one slice is merged while the next travels. For three ranks with
two slices each, ``bounds`` has seven entries::

    vector     |     region of rank 0    |     region of rank 1    |     region of rank 2    |
    slices     |   slot 0   |   slot 1   |   slot 0   |   slot 1   |   slot 0   |   slot 1   |
    bounds     0            1            2            3            4            5            6

For P ranks with k kept elements each, scatter-reduce and allgatherv take ceil(log2 P) messages per rank and slice each.
A rank receives between 2 (P - 1) / P k and ((log2 P / 2 + 1) P - 1) k elements, depending on how far the supports
overlap (equation 6).

With a ``density`` (ours), partial sums are cut to their elements of largest magnitude (``Plan.cut``): the sum of a
region to its share of ``density`` N, and what is sent on the way for several regions to ``SLACK`` times their shares.
What is cut goes to the residual of the rank that cuts it. A rank receives at most ``SLACK`` (1/2 + 1/4 + ...) + 1 times
``density`` N elements then, whatever P is and however the supports lie: 3, or where P is not a power of two up to
twice the first part, since the last rank of an uneven group gets two messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from hvd_deepreduce.codecs.interfaces import U8, Floats, RngKey
from hvd_deepreduce.codecs.joint import short_stream
from hvd_deepreduce.codecs.joint.densestream import DenseStream
from hvd_deepreduce.codecs.joint.stream import Stream, covered_indices
from hvd_deepreduce.codecs.joint.stream_format import check_kind, pack, packed_values, unpack, value_codec
from hvd_deepreduce.codecs.sparse_tensor import SparseTensor
from hvd_deepreduce.codecs.sparsify.topk import kept_of
from hvd_deepreduce.codecs.value.raw import Raw
from hvd_deepreduce.exchange.balance import Histogram, quotas
from hvd_deepreduce.exchange.mpi.announcement import MOST_CARDS, room
from hvd_deepreduce.exchange.mpi.schedules import allgather, halving_rounds
from hvd_deepreduce.exchange.mpi.sum_buffer import SumBuffer
from hvd_deepreduce.exchange.mpi.transport import (
    DEFAULT_TIMEOUT,
    EMPTY,
    MAX_SLICES,
    Program,
    Receive,
    Transport,
    message_tag,
)
from hvd_deepreduce.exchange.settings import DenseStreamExchange
from hvd_deepreduce.exchange.traffic import Traffic
from hvd_deepreduce.ops import arrays, deferred, select
from hvd_deepreduce.ops.types import U32, U64

if TYPE_CHECKING:
    from mpi4py import MPI

SLICE_ELEMENTS = 1 << 13
"""About the number of kept elements of a region that travel as one slice, if there are few slices."""
FEW_SLICES, LONG_SLICE = 16, 4
"""More slices hide no more of the network's time, and each takes the interpreter's: where there would be more than so
many, they become up to so many times as long. Longer ones do not fit in a core's cache."""
PLAIN_BLOCKS = DenseStream(coded=False)
DIRECT_RANKS = 2
"""Up to so many ranks send each other all they keep: for two, no more words than equation 6 half of the messages."""
LEAST_CELLS = 32
"""The least number of cells of the histogram that divides the vector."""
SLACK = 2
"""With ``density``: how many times its share of the sum's elements a partial sum may have that is sent."""
CUT_PARTS = 16
"""With ``density``: regions and slices for which the histogram is made at most. More are divided evenly, which costs no
bytes, since what a rank receives is bounded."""
WHOLE = range(1)
"""The regions of a vector that is divided into slices only: a single one."""
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
    density: float | None = None,
    codec: DenseStream = PLAIN_BLOCKS,
    key: RngKey = RngKey(0, 0, 0),  # noqa: B008  (an immutable tuple)
    timeout: float = DEFAULT_TIMEOUT,
    patience: float | None = None,
) -> SparseTensor | Floats:
    """The sum of all ranks' tensors, bitwise the same on every rank. Collective: every rank of ``comm`` calls it.

    Args:
        comm: an mpi4py intracommunicator. The allreduce uses a duplicate of it, made at the first call.
        tensor: what this rank sends: a sparse tensor, or a dense vector float32 or float64 ``[numel]``, of which the
            nonzero elements are sent.
        dense: return the sum as a dense array instead of a sparse tensor of its nonzero elements. Equal on all ranks.
        out: where to write the dense sum: contiguous, ``[numel]``, of the tensor's dtype, on the host or on a GPU (a
            CuPy array; work goes to the current stream). It shares no memory with ``residual``. Undefined after an
            error.
        scale: a factor for the sum; 1 / ranks gives the mean. The same on all ranks. It is not applied to the residual.
        residual: the accumulated gradient from which ``tensor`` was selected: contiguous, ``[numel]``, of the tensor's
            dtype, on the host or on a GPU. What was sent is subtracted from it, and the rounding errors of lossy values
            on this rank, those of partial sums included, are added to it: over all ranks, sum + residuals after =
            residuals before, to floating-point rounding. An element that was sent as NaN or infinity stays what it is.
            Unchanged after an error.
        fill: send the residual's values in place of zeros inside blocks, at no cost in bytes (proposed at the end of
            section IV.B). Each rank may choose. Coded blocks have zeros with the value codec ``qsgd`` only.
        density: of the sum, in (0, 1]: partial sums are cut to their elements of largest magnitude on the way. What a
            rank cuts is added to its residual, so that nothing is lost; without one, it is lost. Partial sums with NaN
            or infinity are not cut, nor are tensors that travel on cards. None: the sum has all that the ranks keep.
        codec: how streams are packed: plain blocks as in the paper, or coded, and with which value codec.
        key: which sum this is: seed, parameter (or bucket) and step, the same on all ranks, or it is an error. They and
            the rank are the randomness of value codecs that round at random.
        timeout: seconds without any message after which a rank counts as lost, once all ranks have made the call.
        patience: seconds to wait until all ranks have made the call. None: no limit, and a warning every minute, unless
            Horovod's HOROVOD_STALL_SHUTDOWN_TIME_SECONDS and HOROVOD_STALL_CHECK_TIME_SECONDS say otherwise.

    Returns:
        A ``SparseTensor``; with ``dense`` or ``out`` an array ``[numel]``, which is ``out`` if that was given.

    Raises:
        ExchangeError: a ``ValueError``, on all ranks: an argument on one of them is invalid, tensors, arguments or
            settings do not fit together, a message is damaged, a rank has met any other error (no memory, say), or the
            ranks' sums differ.
        LostRankError: a rank died, sent nothing within the timeout, or left the allreduce (by Ctrl-C, say).
        TypeError: ``comm`` is not an intracommunicator.
    """
    from hvd_deepreduce.exchange.mpi.session import Session  # needs mpi4py; the programs below do not

    def prepare(own: SparseTensor) -> SparseTensor:
        if not isinstance(codec, DenseStream):
            raise TypeError(f"codec is {codec!r}; a DenseStream is required")
        if density is not None and not (isinstance(density, Real) and 0 < density <= 1):
            raise ValueError(f"density is {density!r}; it must be above 0 and at most 1, or None")
        if not fill:
            return own
        if residual is None:
            raise ValueError("fill is True and residual is None: fill sends the residual's values, so pass it too")
        indices = covered_indices(own.indices, codec.gap(own.numel, own.values.dtype))

        def kept(places: U32) -> Floats:
            return arrays.to_host(arrays.gather(residual, arrays.move_like(places, residual)))

        filled = kept(indices)
        if kept(own.indices).tobytes() != own.values.tobytes():  # scaled or clipped, say
            filled[np.searchsorted(indices, own.indices)] = own.values
        return SparseTensor(own.numel, indices, filled)

    errors: list[Stream] = []

    def plan_of(own: SparseTensor, bounds: list[int], slices: int) -> Plan:
        own_key = RngKey(*key)._replace(rank=comm.rank)
        most = None if density is None or not own.numel else kept_of(density, own.numel)
        kept = None if residual is None else errors
        return Plan(codec, own.numel, own.values.dtype, bounds, slices, own_key, kept, most)

    def pack_card(own: SparseTensor) -> U8 | None:
        if comm.size > MOST_CARDS or own.values.size * codec.value_bits(own.values.dtype) // 8 > room():
            return None
        plan = plan_of(own, [0, own.numel], 1)
        return plan.pack(Stream.from_sparse(own, plan.gap), WHOLE, 0)

    with Session(
        comm, tensor,
        _description(
            codec if isinstance(codec, DenseStream) else repr(codec),
            float(density) if isinstance(density, Real) else None if density is None else repr(density),
        ),
        dense=dense, out=out, scale=scale, residual=residual, key=key, timeout=timeout, patience=patience,
        prepare=prepare, pack=pack_card,
    ) as session:  # fmt: skip
        own, transport, cards = session.tensor, session.transport, session.cards
        numel = own.numel
        if cards is not None:

            def total() -> SparseTensor | Floats:
                plan = plan_of(own, [0, numel], 1)
                streams = [plan.unpack(card.checked(rank), WHOLE, 0, rank) for rank, card in enumerate(cards)]
                session.sum_buffer.write_region(streams, 0, numel, plan.gap)
                return session.sum_buffer.result()

            return session.run([], total, errors)
        errors.clear()
        slices = slice_count(session.max_kept, transport.size)
        if transport.size <= DIRECT_RANKS and density is None:
            plan = plan_of(own, [numel * part // slices for part in range(slices + 1)], slices)
            make = direct_programs
        else:
            parts = transport.size * slices
            histogram = histogram_of(numel, parts, density is not None)
            narrow = density is not None and session.max_kept * transport.size < 1 << 32
            while histogram.begins.size:
                counts = transport.attempt(np.zeros(histogram.begins.size, np.uint64), kept_in_cells, own, histogram)
                sums = _halves(session.sum(_pairs(counts)))[: counts.size] if narrow else session.sum(counts)
                histogram.add(sums)
            bounds = transport.attempt([0] * parts + [numel], histogram.bounds, parts)
            plan, make = plan_of(own, bounds, slices), programs
        return session.run(make(transport, own, plan, session.sum_buffer), session.sum_buffer.result, errors)


@lru_cache(64)
def _description(codec: DenseStream | str, density: float | str | None) -> str:
    return f"densestream with {codec!r}" + ("" if density is None else f" and density {density}")


def run_exchange(
    settings: DenseStreamExchange,
    comm: MPI.Intracomm,
    tensor: SparseTensor | Floats,
    out: Floats,
    residual: Floats | None,
    key: RngKey,
) -> Traffic:
    """The exchange ``densestream``; see ``settings.ExchangeFunction``."""
    from hvd_deepreduce.exchange.mpi.session import traffic_since

    before = traffic_since(comm)
    codec = DenseStream(coded=settings.coded, value=settings.value, bits=settings.bits)
    fill = settings.fills and residual is not None  # None: no error feedback, or this tensor is not finite
    allreduce(comm, tensor, out=out, residual=residual, fill=fill, density=settings.density, codec=codec, key=key)
    return traffic_since(comm, before)


def slice_count(max_kept: int, ranks: int) -> int:
    """The number of slices per region, if no rank keeps more than ``max_kept`` elements. Few ranks have long ones."""
    short = max_kept // (max(ranks, 1) * SLICE_ELEMENTS)
    long = short // LONG_SLICE
    wanted = long if ranks <= DIRECT_RANKS else min(short, max(FEW_SLICES, long))
    return max(1, min(MAX_SLICES, wanted))


def kept_in_cells(tensor: SparseTensor, histogram: Histogram) -> U64:
    """How many kept elements each of the histogram's next cells holds."""
    return histogram.count(tensor.indices).astype(np.uint64)


def histogram_of(numel: int, parts: int, cuts: bool) -> Histogram:
    """That which the ranks sum to divide a vector into ``parts``; ``cuts``: with a density."""
    return Histogram(numel, min(parts, CUT_PARTS) if cuts else parts, LEAST_CELLS)


def _pairs(counts: U64) -> U64:
    """Two numbers below 2^32 in one, whose sums are the numbers' sums while these are below 2^32."""
    padded = np.append(counts, np.zeros(counts.size % 2, np.uint64))
    return padded[::2] | padded[1::2] << np.uint64(32)


def _halves(sums: U64) -> U64:
    """The numbers of ``_pairs``, and a 0 if they were odd in number."""
    return np.stack([sums & np.uint64(0xFFFFFFFF), sums >> np.uint64(32)], 1).ravel()


def balanced_split(tensors: Sequence[SparseTensor], parts: int, cuts: bool = False) -> tuple[list[int], list[int]]:
    """Of all ranks' tensors, in one process: the boundaries that the ranks agree on, and how many numbers they sum in
    each round, if they keep less than 2^32 elements in all."""
    histogram, rounds = histogram_of(tensors[0].numel, parts, cuts), []
    while histogram.begins.size:
        rounds.append((histogram.begins.size + 1) // 2 if cuts else histogram.begins.size)
        histogram.add(np.sum([kept_in_cells(tensor, histogram) for tensor in tensors], 0))
    return histogram.bounds(parts), rounds


class Plan:
    """What the programs of one allreduce share: the boundaries of regions and slices, and how streams are packed.

    Args:
        codec: how streams are packed.
        numel, dtype: of the vector.
        bounds: the boundaries of all slices, ``[ranks * slices + 1]``; see the drawing above.
        slices: the number of slices per region.
        key: the randomness of the value codec.
        errors: a list that receives the rounding errors of all packed streams, and what is cut; None: they are lost.
        most: the number of elements that the sum is cut to; None: it is not cut.
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
        most: int | None = None,
    ) -> None:
        self.form, self.gap = codec.form, codec.gap(numel, dtype)
        self.values = value_codec(codec.value, codec.bits)
        self.numel, self.dtype, self.bounds, self.slices = numel, dtype, bounds, slices
        self.key, self.errors = key, errors
        self.quotas = None if most is None else quotas(bounds, most)

    def element_range(self, ranks: range, slot: int) -> tuple[int, int]:
        """The elements (begin, end) from the slice ``slot`` of the first of ``ranks`` to that of the last."""
        return self.bounds[ranks[0] * self.slices + slot], self.bounds[ranks[-1] * self.slices + slot + 1]

    def pack(self, stream: Stream, ranks: range, slot: int) -> U8:
        """Packs a stream of the slices ``slot`` of ``ranks``, and records its rounding errors."""
        begin, end = self.element_range(ranks, slot)
        # Every stream of this rank is rounded with random numbers of its own. No rank packs the same slices twice.
        number = (ranks.start * (len(self.bounds) // self.slices) + len(ranks)) * MAX_SLICES + slot
        key = self.key._replace(parameter=(self.key.parameter + number * 0x9E3779B1) & 0xFFFFFFFF)
        section = pack(stream, self.form, self.values, key, begin, end)
        if self.errors is not None and self.values.id != Raw.id and deferred.finite(stream.values):
            rounded = stream.values - packed_values(section, self.dtype)
            self.errors.append(Stream(self.numel, stream.starts, stream.lengths, rounded))
        return section

    def cut(self, stream: Stream, ranks: range, slot: int, slack: int = 1) -> Stream:
        """What is sent of a sum of the slices ``slot`` of ``ranks``: of its elements of largest magnitude, ties to the
        lower index, ``slack`` times the slices' share. Keeps the others for the residual."""
        if self.quotas is None:
            return stream
        most = slack * sum(self.quotas[rank * self.slices + slot] for rank in ranks)
        if stream.values.size <= most or not deferred.finite(stream.values):
            return stream
        whole = stream.to_sparse()
        if whole.indices.size <= most:
            return stream
        indices, values = select.topk_of(whole.indices, whole.values, most)
        if self.errors is not None:
            places = np.searchsorted(whole.indices, indices)
            dropped = SparseTensor(self.numel, np.delete(whole.indices, places), np.delete(whole.values, places))
            self.errors.append(Stream.from_sparse(dropped, 0))
        return CutOff(SparseTensor(self.numel, indices, values), self).stream(ranks, slot)

    def unpack(self, section: U8, ranks: range, slot: int, sender: int) -> Stream:
        """What ``pack`` wrote on the rank ``sender``.

        Raises:
            ValueError: the section is damaged; the text names the sender.
        """
        try:
            section = short_stream.lengthen(section, self.numel, self.dtype)
            # Values that are not all finite are sent raw.
            check_kind(section, (self.form,), tuple(sorted({Raw.id, self.values.id})))
            return unpack(section, self.numel, self.dtype, None, *self.element_range(ranks, slot))
        except ValueError as error:
            raise ValueError(f"cannot read the stream of rank {sender}: {error}") from None


class CutOff:
    """What one rank keeps, from which its programs take the parts that they send, each when it is its turn.

    Args:
        tensor: of contiguous arrays.
        plan: of the allreduce.
    """

    def __init__(self, tensor: SparseTensor, plan: Plan) -> None:
        self.tensor, self.plan = tensor, plan
        self.at = np.searchsorted(tensor.indices, np.array(plan.bounds, np.uint32)).astype(np.uint64)

    def stream(self, ranks: range, slot: int) -> Stream:
        """The slices ``slot`` of the regions of ``ranks``."""
        first = np.array(ranks) * self.plan.slices + slot
        return Stream.from_pieces(self.tensor, np.stack([self.at[first], self.at[first + 1]], 1), self.plan.gap)


def programs(transport: Transport, tensor: SparseTensor, plan: Plan, sum_buffer: SumBuffer | None) -> list[Program]:
    """One rank's programs, one per slice.

    Args:
        tensor: what this rank keeps.
        sum_buffer: receives the sum; None: the sum is not decoded (for counting messages in a simulation).
    """
    kept = transport.attempt(None, CutOff, tensor, plan)
    return [_program(transport, slot, kept, plan, sum_buffer) for slot in range(plan.slices)]


def direct_programs(
    transport: Transport, tensor: SparseTensor, plan: Plan, sum_buffer: SumBuffer | None
) -> list[Program]:
    """The programs of a few ranks, one per slice, which send each other all that they keep; arguments of ``programs``.

    ``plan.bounds`` divides the vector into slices only."""
    kept = transport.attempt(None, CutOff, tensor, plan)
    return [_direct_program(transport, slot, kept, plan, sum_buffer) for slot in range(plan.slices)]


def _own(transport: Transport, kept: CutOff | None, plan: Plan, ranks: range, slot: int) -> Stream:
    """What this rank keeps of the slices ``slot`` of ``ranks``; nothing if it has failed."""
    nothing = Stream.empty(plan.numel, plan.dtype)
    return nothing if kept is None else transport.attempt(nothing, kept.stream, ranks, slot)


def _direct_program(
    transport: Transport, slot: int, kept: CutOff | None, plan: Plan, sum_buffer: SumBuffer | None
) -> Program:
    begin, end = plan.element_range(WHOLE, slot)
    streams: list[Stream | None] = [None] * transport.size
    own = _own(transport, kept, plan, WHOLE, slot)

    def deliver(rank: int, section: U8) -> None:
        sent_as_it_is = rank == transport.rank and plan.values.id == Raw.id
        streams[rank] = own if sent_as_it_is else plan.unpack(section, WHOLE, slot, rank)

    def add() -> None:
        if sum_buffer is not None:
            sum_buffer.write_region([stream for stream in streams if stream is not None], begin, end, plan.gap)

    section = transport.attempt(EMPTY, plan.pack, own, WHOLE, slot)
    tag = message_tag(ALLGATHER, slot)
    yield from allgather(transport, tag, section, lambda ranks: len(ranks) * (end - begin), deliver)
    transport.attempt(None, add)


def _program(transport: Transport, slot: int, kept: CutOff | None, plan: Plan, sum_buffer: SumBuffer | None) -> Program:
    def elements(ranks: range) -> int:
        begin, end = plan.element_range(ranks, slot)
        return end - begin

    tag = message_tag(SCATTER_REDUCE, slot)
    rounds = halving_rounds(transport.rank, transport.size)
    stream = Stream.empty(plan.numel, plan.dtype)
    for number, halving in enumerate(rounds):
        if number:
            cut = plan.bounds[halving.middle * plan.slices + slot]
            left, right = transport.attempt([stream, stream], stream.split, np.array([cut], np.uint64))
            stream, given = (left, right) if halving.own_half[0] < halving.middle else (right, left)
        else:
            given = _own(transport, kept, plan, halving.other_half, slot)
        given = transport.attempt(given, plan.cut, given, halving.other_half, slot, SLACK)
        section = transport.attempt(EMPTY, plan.pack, given, halving.other_half, slot)
        for to in halving.send_to:
            transport.send(to, tag, [section])
        if not number:
            stream = _own(transport, kept, plan, halving.own_half, slot)
        for source in halving.receive_from:
            (message,) = yield Receive(source, tag, 1, elements(halving.own_half))
            received = transport.attempt(stream, plan.unpack, message, halving.own_half, slot, source)
            stream = transport.attempt(stream, stream.merge, received, plan.gap)

    def deliver(rank: int, section: U8) -> None:
        region = range(rank, rank + 1)
        if sum_buffer is not None:
            sum_buffer.write_region([plan.unpack(section, region, slot, rank)], *plan.element_range(region, slot))

    own = range(transport.rank, transport.rank + 1)
    if not rounds:
        stream = _own(transport, kept, plan, own, slot)
    stream = transport.attempt(stream, plan.cut, stream, own, slot)
    section = transport.attempt(EMPTY, plan.pack, stream, own, slot)
    if plan.quotas is not None:  # every rank receives such a section of all others
        section = transport.attempt(EMPTY, short_stream.shorten, section)
    yield from allgather(transport, message_tag(ALLGATHER, slot), section, elements, deliver)
