"""Slices of a vector that hold about as many of all ranks' kept elements each.

The ranks agree on a histogram of their supports. It begins with cells of equal width; a cell that holds too much is
divided into narrower ones, which are counted again, so that supports may lie anywhere: for nearly uniform supports the
first round is the last. A round is itself a reduce-scatter of small numbers: rank r gets all ranks' counts of a P-th of
the cells, adds them up, and sends the sums to all, in one byte each.

Li, Hoefler, "Near-optimal sparse allreduce for distributed deep learning" (Ok-Topk), PPoPP 2022, divides the vector by
the ranks' consensus too, by an average of their boundaries, which can miss: where half of the ranks keep the front and
half the back, the mean lies in the middle.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvd_deepreduce.codecs.interfaces import U8, U32
from hvd_deepreduce.wire.standalone import ContainerError, refusal

I64 = NDArray[np.int64]
CELLS_PER_PART, LEAST_CELLS = 4, 256
HEAVY = 0.5
"""A cell that holds more than this share of a slice's mean is divided."""
MOST_PARTS = 3 << 15
"""Of the histogram, times the ranks: on more than 313 ranks it gets coarser, as their slices get shorter."""


class AllToAll(NamedTuple):
    """A request for an alltoall; the answer is uint8 ``[n]``, what has come in rank order, and the bytes of each rank.

    Attributes:
        data: uint8 ``[sum of splits]``.
        splits: bytes for each rank.
    """

    data: U8
    splits: list[int]


class AllGather(NamedTuple):
    """A request for an allgather; the answer is uint8 ``[n]``, what all ranks have sent, in their order.

    Attributes:
        data: uint8.
        last: whether the program sends nothing afterwards.
    """

    data: U8
    last: bool = False


class Inside(NamedTuple):
    """A request for a collective of the ranks of this rank's node, where the others are of ranks of several nodes."""

    asked: AllToAll | AllGather


Steps = Generator[AllToAll | AllGather, Any, Any]
"""A program of one rank, which asks for collectives and is sent their answers. All ranks' programs ask for the same."""


def equal_bounds(numel: int, ranks: int) -> list[int]:
    """The ``ranks + 1`` boundaries of equally long slices."""
    return [numel * rank // ranks for rank in range(ranks + 1)]


def quotas(bounds: list[int], total: int) -> list[int]:
    """How many elements each slice may send of ``total``: as many as any other, or all that it has; at least one."""
    lengths = np.diff(bounds)
    low, high = 0, int(lengths.max(initial=0))
    while low < high:  # the largest level at which the sum of min(level, length) is within the total
        level = (low + high + 1) // 2
        low, high = (level, high) if int(np.minimum(lengths, level).sum()) <= total else (low, level - 1)
    shares = np.minimum(lengths, low)
    more = np.flatnonzero(lengths > low)[: total - int(shares.sum())]
    shares[more] += 1
    least: list[int] = np.maximum(shares, np.minimum(lengths, 1)).tolist()
    return least


def parts_of(ranks: int) -> int:
    """How many slices a histogram is made for; those of more ranks divide its cells evenly."""
    return min(ranks, max(1, MOST_PARTS // ranks))


def cells_of(numel: int, parts: int, least: int = LEAST_CELLS) -> int:
    """How many cells of a vector a histogram for so many slices counts first."""
    return min(numel, max(CELLS_PER_PART * parts, least))


class Histogram:
    """The numbers of all ranks' kept elements in cells of a vector; every rank makes one, and adds the same sums.

    Args:
        numel: of the vector.
        parts: into how many slices it is to be divided.
        least: the least number of cells that are counted at a time.

    Attributes:
        begins, ends: int64 ``[n]``: the cells that are to be counted next; none: the histogram is complete.
    """

    def __init__(self, numel: int, parts: int, least: int = LEAST_CELLS) -> None:
        cells = cells_of(numel, parts, least)
        self.numel, self.parts, self.least = numel, parts, least
        self.begins: I64 = np.arange(cells, dtype=np.int64) * numel // max(1, cells)
        self.ends: I64 = np.append(self.begins[1:], numel)[:cells]
        self._cells: tuple[I64, I64, NDArray[np.float64]] = (*np.zeros((2, 0), np.int64), np.zeros(0))

    def count(self, indices: U32) -> I64:
        """How many of the sorted indices, on the host, each of the next cells holds."""
        first, last = (np.searchsorted(indices, places.astype(np.uint32)) for places in (self.begins, self.ends))
        return last - first

    def add(self, sums: NDArray[Any]) -> None:
        """The next cells hold so many elements of all ranks, exactly or rounded up; those after them follow."""
        counted = self.begins, self.ends, sums.astype(np.float64)
        begins, ends, held = (np.concatenate(both) for both in zip(self._cells, counted, strict=True))
        mean = held.sum() / self.parts
        heavy = (held > HEAVY * mean) & (ends - begins > 1)
        order = np.argsort(begins[~heavy], kind="stable")
        self._cells = begins[~heavy][order], ends[~heavy][order], held[~heavy][order]
        few = self.least // max(1, int(heavy.sum()))
        self.begins, self.ends = _divide(begins[heavy], ends[heavy], held[heavy] / mean if mean else mean, few)

    def bounds(self, parts: int | None = None) -> list[int]:
        """The ``parts + 1`` boundaries of slices that hold about as many elements each.

        Args:
            parts: how many slices; None: as many as the cells were made for, which end where cells end. More: elements
                are taken to be spread evenly in a cell.
        """
        begins, ends, sums = self._cells
        parts = self.parts if parts is None else parts
        if not sums.any():
            return equal_bounds(self.numel, parts)
        held = np.append(0, np.cumsum(sums))
        wanted = held[-1] * np.arange(1, parts) / parts
        after = np.searchsorted(held, wanted)
        if parts > self.parts:
            share = (wanted - held[after - 1]) / sums[after - 1]
            inside = begins[after - 1] + np.rint(share * (ends - begins)[after - 1]).astype(np.int64)
            return [0, *inside.tolist(), self.numel]
        nearest = after - (wanted - held[after - 1] < held[after] - wanted)
        return [0, *np.append(begins, self.numel)[nearest].tolist(), self.numel]


def balanced_bounds(
    indices: U32, numel: int, rank: int, ranks: int, fail: Callable[[Exception], None]
) -> Generator[AllToAll | AllGather, Any, list[int]]:
    """The ``ranks + 1`` boundaries of slices; equal on all ranks.

    With T elements kept by all ranks together, a slice holds at most about 1.6 T / ranks of them, or those of a single
    index if that is more. Where ``MOST_PARTS`` makes cells larger, elements are taken to be spread evenly in a cell, of
    which several slices are made.

    Args:
        indices: sorted, what this rank keeps; on the host.
        fail: is given an error that this rank must tell the others: counts that cannot be read count as zeros.

    Raises:
        ContainerError: the sums cannot be read; on all ranks.
    """
    histogram = Histogram(numel, parts_of(ranks))
    while histogram.begins.size:
        histogram.add((yield from _sums(histogram.count(indices), rank, ranks, fail)))
    return histogram.bounds(ranks)


def _divide(begins: I64, ends: I64, loads: NDArray[np.float64], least: int) -> tuple[I64, I64]:
    """Narrower cells in place of these: about ``CELLS_PER_PART`` for each slice's mean that one holds, at least two."""
    widths = ends - begins
    parts = np.minimum(widths, np.maximum(np.ceil(CELLS_PER_PART * loads).astype(np.int64), max(2, least)))
    of = np.repeat(np.arange(parts.size), parts)
    number = np.arange(of.size) - np.repeat(np.cumsum(parts) - parts, parts)
    return begins[of] + widths[of] * number // parts[of], begins[of] + widths[of] * (number + 1) // parts[of]


def _sums(
    counts: I64, rank: int, ranks: int, fail: Callable[[Exception], None]
) -> Generator[AllToAll | AllGather, Any, NDArray[np.float64]]:
    """All ranks' sums of each count; counts and sums are rounded up to numbers of one byte (``to_codes``)."""
    bounds = equal_bounds(counts.size, ranks)
    received, sizes = yield AllToAll(to_codes(counts), np.diff(bounds).tolist())
    total = np.zeros(bounds[rank + 1] - bounds[rank], np.int64)
    ends = np.cumsum(sizes).tolist()
    for sender, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        if size != total.size:
            fail(refusal(sender, f"it has {size} bytes of counts of {total.size} cells"))
        else:
            total += from_codes(received[end - size : end]).astype(np.int64)
    gathered = yield AllGather(to_codes(total))
    if gathered.size != counts.size:
        raise ContainerError(f"the ranks have sent the sums of {gathered.size} cells, and there are {counts.size}")
    return from_codes(gathered)


def to_codes(numbers: I64) -> U8:
    """Each number as 3 bits of a mantissa and 5 of an exponent, rounded up by at most 1/8; below 16 it is exact."""
    exponent = np.maximum(0, np.frexp(np.maximum(numbers, 1).astype(np.float64))[1] - 4)
    mantissa = -(-numbers >> exponent)  # 0 to 16
    carried = mantissa > 15
    exponent, mantissa = exponent + carried, np.where(carried, 8, mantissa)
    codes = np.where(mantissa < 8, mantissa, 8 * exponent + mantissa)
    return np.minimum(codes, 255).astype(np.uint8)


def from_codes(codes: U8) -> NDArray[np.float64]:
    """The numbers that ``to_codes`` has written."""
    code = codes.astype(np.int64)
    exponent = np.maximum(0, (code >> 3) - 1)
    numbers: NDArray[np.float64] = (np.where(code < 8, code, 8 + (code & 7)) << exponent).astype(np.float64)
    return numbers
