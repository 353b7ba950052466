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

from collections.abc import Generator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvd_deepreduce.codec import U8, U32
from hvd_deepreduce.container import ContainerError, refusal

I64 = NDArray[np.int64]
CELLS_PER_RANK, LEAST_CELLS = 4, 256
HEAVY = 0.5
"""A cell that holds more than this share of a rank's mean is divided."""
_COUNTS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32}


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


def balanced_bounds(
    indices: U32, numel: int, rank: int, ranks: int, failures: list[Exception]
) -> Generator[AllToAll | AllGather, Any, list[int]]:
    """The ``ranks + 1`` boundaries of slices; equal on all ranks.

    With T elements kept by all ranks together, a slice holds at most about 1.6 T / ranks of them, or those of a single
    index if that is more.

    Args:
        indices: sorted, what this rank keeps; on the host.
        failures: gets an error that this rank must tell the others: counts that cannot be read count as zeros.

    Raises:
        ContainerError: the sums cannot be read; on all ranks.
    """
    cells = min(numel, max(CELLS_PER_RANK * ranks, LEAST_CELLS))
    begins: I64 = np.arange(cells, dtype=np.int64) * numel // max(1, cells)
    ends: I64 = np.append(begins[1:], numel)
    sums = yield from _sums(_count(indices, begins, ends), rank, ranks, failures)
    while True:
        mean = sums.sum() / ranks
        heavy = (sums > HEAVY * mean) & (ends - begins > 1)
        if not heavy.any():
            break
        narrow = _divide(begins[heavy], ends[heavy], sums[heavy] / mean, LEAST_CELLS // int(heavy.sum()))
        counted = yield from _sums(_count(indices, *narrow), rank, ranks, failures)
        begins, ends, sums = (
            np.concatenate([old[~heavy], new])
            for old, new in zip((begins, ends, sums), (*narrow, counted), strict=True)
        )
        order = np.argsort(begins, kind="stable")
        begins, ends, sums = begins[order], ends[order], sums[order]
    if not sums.any():
        return equal_bounds(numel, ranks)
    held = np.append(0, np.cumsum(sums))
    wanted = held[-1] * np.arange(1, ranks) / ranks
    after = np.searchsorted(held, wanted)
    nearest = after - (wanted - held[after - 1] < held[after] - wanted)
    return [0, *np.append(begins, numel)[nearest].tolist(), numel]


def _count(indices: U32, begins: I64, ends: I64) -> I64:
    """How many of the indices each cell holds."""
    first, last = (np.searchsorted(indices, places.astype(np.uint32)) for places in (begins, ends))
    return last - first


def _divide(begins: I64, ends: I64, loads: NDArray[np.float64], least: int) -> tuple[I64, I64]:
    """Narrower cells in place of these: about ``CELLS_PER_RANK`` for each rank's mean that one holds, at least two."""
    widths = ends - begins
    parts = np.minimum(widths, np.maximum(np.ceil(CELLS_PER_RANK * loads).astype(np.int64), max(2, least)))
    of = np.repeat(np.arange(parts.size), parts)
    number = np.arange(of.size) - np.repeat(np.cumsum(parts) - parts, parts)
    return begins[of] + widths[of] * number // parts[of], begins[of] + widths[of] * (number + 1) // parts[of]


def _sums(
    counts: I64, rank: int, ranks: int, failures: list[Exception]
) -> Generator[AllToAll | AllGather, Any, NDArray[np.float64]]:
    """All ranks' sums of each count, rounded up to numbers of one byte (``to_codes``)."""
    bounds = equal_bounds(counts.size, ranks)
    parts = [counts[i:j] for i, j in zip(bounds, bounds[1:], strict=False)]
    narrow = [part.astype(_COUNTS[_itemsize(part)]).view(np.uint8) for part in parts]
    received, sizes = yield AllToAll(np.concatenate(narrow), [part.size for part in narrow])
    total = np.zeros(parts[rank].size, np.int64)
    ends = np.cumsum(sizes).tolist()
    for sender, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        itemsize = size // max(1, total.size)
        if size != itemsize * total.size or (total.size and itemsize not in _COUNTS):
            failures.append(refusal(sender, f"it has {size} bytes of counts of {total.size} cells"))
        elif size:
            total += received[end - size : end].copy().view(_COUNTS[itemsize])
    gathered = yield AllGather(to_codes(total))
    if gathered.size != counts.size:
        raise ContainerError(f"the ranks have sent the sums of {gathered.size} cells, and there are {counts.size}")
    return from_codes(gathered)


def _itemsize(part: I64) -> int:
    most = int(part.max(initial=0))
    return 1 if most < 1 << 8 else 2 if most < 1 << 16 else 4


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
