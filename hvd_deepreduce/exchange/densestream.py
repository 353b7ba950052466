"""DenseStream's allreduce (DSA): balanced split, scatter-reduce by recursive halving, allgatherv by recursive doubling.

Li, Chao, Liao, Lv, "DenseStream", section III.B and algorithm 2. A region for each rank: what it reduces, and then
hands to all. Each region is sliced once more, so that one slice is merged while the next travels; the slices of one
number in all regions are one program (see ``channel``).

For P ranks with k kept elements each, in rounds of one message: ceil(log2 P) rounds there and as many back, between
2 (P - 1) / P k and ((log2 P / 2 + 1) P - 1) k elements received a rank (equation 6), by how far the supports overlap.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from hvd_deepreduce.codec import U8, Floats, Key
from hvd_deepreduce.exchange.channel import SLOTS, TIMEOUT, Program, Session, Total, Traffic, gather, halving
from hvd_deepreduce.joint.densestream import DenseStream, Stream, covered, pack, unpack, value_codec
from hvd_deepreduce.ops import arrays, deferred, densestream
from hvd_deepreduce.sparse import SparseTensor

U64 = np.ndarray[Any, np.dtype[np.uint64]]
SLICE = 1 << 14
"""Kept elements of a region, about, that travel as one slice."""
PLAIN_BLOCKS = DenseStream(coded=False)


def allreduce(
    comm: MPI.Comm,
    tensor: SparseTensor | Floats,
    *,
    dense: bool = False,
    out: Floats | None = None,
    scale: float = 1.0,
    residual: Floats | None = None,
    fill: bool = False,
    codec: DenseStream = PLAIN_BLOCKS,
    key: Key = Key(0, 0, 0),  # noqa: B008  (an immutable tuple)
    timeout: float = TIMEOUT,
) -> SparseTensor | Floats:
    """The sum of all ranks' tensors, bitwise the same on every rank. Collective: every rank of ``comm`` calls it.

    Args:
        comm: an intracommunicator; the exchange uses a duplicate, made at the first call.
        tensor: what this rank sends; of a dense vector, the elements that are not zero.
        dense: the sum as a dense array; else as a sparse tensor of the elements that are not zero.
        out: where to write the dense sum; its content is undefined after an error.
        scale: a factor for the sum, 1 / ranks for the mean; the residual is settled without it.
        residual: the accumulated gradient out of which ``tensor`` was taken, all ``numel`` elements. What was sent is
            subtracted from it, and what lossy values lost on this rank, its partial sums too, is put back: over all
            ranks, sum + residuals after = residuals before, to rounding. Left as it is after an error.
        fill: send the residual's own values in place of the zeros inside blocks, at no cost in bytes.
        codec: how streams are written: plain blocks as in the paper, or coded and with shorter values.
        key: of lossy values' random rounding.
        timeout: seconds without any message after which a rank counts as lost.

    Raises:
        ExchangeError: a ``ValueError``, on all ranks: where tensors do not fit together or a message is broken.
        LostRankError: where a rank died or stayed silent.
    """
    if fill and residual is None:
        raise ValueError("fill sends the residual's values, so it needs the residual: pass residual=, or fill=False")
    settings = f"densestream with {codec!r}"  # each rank may fill or not
    with Session(comm, tensor, settings, dense or out is not None, out, scale, residual, timeout) as session:
        own, traffic = session.tensor, session.traffic
        gap = codec.gap(own.numel, own.values.dtype)
        if fill and residual is not None:
            indices = covered(own.indices, own.numel, gap)
            own = SparseTensor(own.numel, indices, arrays.gather(residual, indices))
        slices = slices_of(session.most, traffic.size)
        totals = session.channel.reduce(boundaries(own, traffic.size * slices), MPI.SUM)
        bounds = averaged(totals, own.numel)
        lost: list[Stream] | None = [] if residual is not None and codec.value != "raw" else None
        job = Job(codec, own.numel, own.values.dtype, bounds, slices, key._replace(rank=traffic.rank), lost)
        jobs = programs(traffic, Stream.encode(own, gap), job, session.total)
        total = session.finish(jobs, session.total.value)
        if residual is not None:
            arrays.subtract_sent(residual, own.indices, own.values)
            for stream in lost or []:
                densestream.add_to(stream.starts, stream.lengths, stream.values, residual)
        return total


def slices_of(most: int, ranks: int) -> int:
    """Into how many slices to cut each region, where a rank keeps at most so many elements."""
    return max(1, min(SLOTS, most // (max(ranks, 1) * SLICE)))


def boundaries(tensor: SparseTensor, parts: int) -> U64:
    """Where ``parts`` equal shares of the kept elements begin (but for the first), and 1 behind them: how many ranks
    have a say. All zero for a rank that keeps nothing."""
    kept = tensor.indices.size
    own = np.zeros(parts, np.uint64)
    if kept:
        own[:-1] = tensor.indices[np.arange(1, parts, dtype=np.uint64) * np.uint64(kept) // np.uint64(parts)]
        own[-1] = 1
    return own


def averaged(totals: U64, numel: int) -> list[int]:
    """The ``parts + 1`` bounds of all ranks, from the sum of their ``boundaries``; equal ones where none has a say."""
    parts = totals.size
    ranks = int(totals[-1])
    if ranks:
        inner = (totals[:-1] // np.uint64(ranks)).tolist()
    else:
        inner = [numel * part // parts for part in range(1, parts)]
    return [0, *inner, numel]


class Job:
    """What the programs of one allreduce have in common: how to write streams, and where regions and slices begin."""

    def __init__(
        self,
        codec: DenseStream,
        numel: int,
        dtype: np.dtype[Any],
        bounds: list[int],
        slices: int,
        key: Key,
        lost: list[Stream] | None,
    ) -> None:
        self.form, self.gap = codec.form, codec.gap(numel, dtype)
        self.values = value_codec(codec.value, codec.bits)
        self.numel, self.dtype, self.bounds, self.slices = numel, dtype, bounds, slices
        self.key, self.lost, self.packed = key, lost, 0

    def reach(self, ranks: range, slot: int) -> tuple[int, int]:
        """Between which elements the slice ``slot`` of the regions of ``ranks`` lies."""
        return self.bounds[ranks[0] * self.slices + slot], self.bounds[ranks[-1] * self.slices + slot + 1]

    def pack(self, stream: Stream, ranks: range, slot: int) -> U8:
        """The stream's bytes; what they lose is noted."""
        begin, end = self.reach(ranks, slot)
        self.packed += 1  # random rounding with numbers of its own for every stream of this rank
        key = self.key._replace(parameter=(self.key.parameter + self.packed * 0x9E3779B1) & 0xFFFFFFFF)
        section = pack(stream, self.form, self.values, key, begin, end)
        if self.lost is not None and deferred.finite(stream.values):
            sent = unpack(section, self.numel, self.dtype, None, begin, end)
            self.lost.append(Stream(self.numel, stream.starts, stream.lengths, stream.values - sent.values))
        return section

    def unpack(self, section: U8, ranks: range, slot: int, sender: int) -> Stream:
        """The stream that another rank sent."""
        try:
            return unpack(section, self.numel, self.dtype, None, *self.reach(ranks, slot))
        except ValueError as error:
            raise ValueError(f"the stream of rank {sender} cannot be read: {error}") from None


def programs(traffic: Traffic, stream: Stream, job: Job, total: Total | None) -> list[Program]:
    """A program for each slice."""
    pieces = stream.split(np.array(job.bounds[1:-1], np.uint64))
    return [_program(traffic, slot, Stream.join(pieces[slot :: job.slices]), job, total) for slot in range(job.slices)]


def _program(traffic: Traffic, slot: int, stream: Stream, job: Job, total: Total | None) -> Program:
    for step in halving(traffic.rank, traffic.size):
        cut = job.bounds[step.middle * job.slices + slot]
        below, above = stream.split(np.array([cut], np.uint64))
        stream, give = (below, above) if step.mine[0] < step.middle else (above, below)
        section = traffic.attempt(np.empty(0, np.uint8), job.pack, give, step.other, slot)
        for to in step.sends:
            traffic.send(to, slot, [section])
        for source in step.receives:
            (message,) = yield source, slot, 1
            theirs = traffic.attempt(stream, job.unpack, message, step.mine, slot, source)
            stream = traffic.attempt(stream, stream.merge, theirs, job.gap)

    def deliver(rank: int, section: U8) -> None:
        region = range(rank, rank + 1)
        if total is not None:
            total.put(job.unpack(section, region, slot, rank), *job.reach(region, slot))

    mine = range(traffic.rank, traffic.rank + 1)
    section = traffic.attempt(np.empty(0, np.uint8), job.pack, stream, mine, slot)
    yield from gather(traffic, SLOTS + slot, section, deliver)
