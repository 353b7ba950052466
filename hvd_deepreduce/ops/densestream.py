"""DenseStream: a sparse vector as dense blocks (codecs/joint/densestream.py, exchange/mpi/densestream.py).

A stream is three arrays: ``starts`` and ``lengths``, uint32 ``[blocks]``, and ``values``, float32 or float64, the
blocks' values one after the other with the zeros inside blocks written out. kernels/densestream/densestream.h draws it.
The blocks are in order and do not overlap; except where an operation says otherwise, they are not checked.
"""

from __future__ import annotations

from ctypes import byref, c_uint64
from typing import Any

import numpy as np

from hvd_deepreduce.ops.deferred import check_later, counter, read_counter, state
from hvd_deepreduce.ops.device import NULL, array_module, cleared, for_each, grid, launch, scan_status, suffix
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import check, kernel, kernels_by_dtype
from hvd_deepreduce.ops.types import U32, U64, Device, Floats, i32, u32, u64

_FILE = "densestream/densestream"

MOST = 2**31 - 1
"""The most blocks, and covered elements, of a stream on a GPU."""
NOWHERE = 2**64 - 1
_stream_count = kernel("stream_count", "U", "pUu*")
_stream_encode = kernels_by_dtype("stream_encode", "v", "ppUuppp")
_stream_check = kernel("stream_check", "I", "ppUUUU")
_stream_indices = kernel("stream_indices", "v", "ppUp")
_stream_nonzero = kernels_by_dtype("stream_nonzero", "U", "ppUppp")
_stream_dense = kernels_by_dtype("stream_dense", "v", "ppUpUUp")
_stream_add = kernels_by_dtype("stream_add", "v", "ppUpp")
_stream_merge = kernels_by_dtype("stream_merge", "U", "pppUUpppUUuppp*")
_stream_split = kernel("stream_split", "v", "ppUpUpppp")
_stream_gaps = kernel("stream_gaps", "v", "ppUupp")
_stream_blocks = kernel("stream_blocks", "I", "ppUu")


def _check_count(count: int) -> None:
    if count > MOST:
        raise ValueError(f"a stream on a GPU can cover up to {MOST} elements, and this one may cover {count}: split it")


def broken_blocks(begin: int, end: int, count: int) -> ValueError:
    """The error for blocks from the wire that no encoder writes."""
    return ValueError(
        f"its blocks are empty, overlap, are out of order, leave the elements {begin} to {end}, or do not hold {count} "
        "values"
    )


def _check_pairs(starts: U32, lengths: U32) -> None:
    if starts.size != lengths.size:
        raise ValueError(f"its blocks have {starts.size} starts and {lengths.size} lengths: both must be as many")


def _firsts(xp: Any, lengths: Device) -> Device:
    """The place of each block's first value: uint32 ``[blocks]``."""
    firsts = xp.empty(lengths.size, u32)
    for_each(
        xp, _FILE, "stream_firsts", lengths.size, lengths, lengths.size, scan_status(xp, lengths.size), counter(xp),
        firsts,
    )  # fmt: skip
    return firsts


def _scatter(starts: Device, lengths: Device, values: Device, begin: int, adds: bool, dense: Device) -> None:
    """``dense[index - begin] = value`` for each covered element, or ``+=`` with ``adds``."""
    xp = array_module(starts)
    for_each(
        xp, _FILE, f"stream_scatter_{suffix(values.dtype)}", values.size, starts, _firsts(xp, lengths), starts.size,
        values, values.size, begin, u32(adds), dense,
    )  # fmt: skip


@operation()
def encode(indices: U32, values: Floats, gap: int) -> tuple[U32, U32, Floats]:
    """The stream of sparse elements: starts, lengths and values.

    On a GPU, the host waits for the device to learn the numbers of blocks and of covered elements.

    Args:
        indices: uint32 ``[n]``, increasing.
        values: float32 or float64 ``[n]``.
        gap: a block ends where more than so many zeros follow.

    Raises:
        ValueError: on a GPU, the stream covers 2^31 elements or more.
    """
    covered = c_uint64()
    blocks = _stream_count(indices, indices.size, gap, byref(covered))
    starts, lengths = np.empty(blocks, np.uint32), np.empty(blocks, np.uint32)
    out = np.empty(covered.value + gap, values.dtype)
    _stream_encode[values.dtype](indices, values, indices.size, gap, starts, lengths, out)
    return starts, lengths, out[: covered.value]


@encode.cuda
def _(indices: Device, values: Device, gap: int) -> tuple[Device, Device, Device]:
    starts, lengths, _, out = _written(indices, values, gap)
    return starts, lengths, out


@operation()
def cover(indices: U32, gap: int) -> tuple[U32, U32, U32]:
    """The blocks of sorted indices, and the indices of all elements inside them, those of ``indices`` and the few
    between: starts, lengths, and uint32 ``[covered]``, which is ``indices`` itself if there are no others.

    Arguments, waits and errors are those of ``encode``.
    """
    starts, lengths, covered = encode.host(indices, indices.view(np.float32), gap)
    if covered.size == indices.size:
        return starts, lengths, indices
    support = np.empty(covered.size, np.uint32)
    _stream_indices(starts, lengths, starts.size, support)
    return starts, lengths, support


@cover.cuda
def _(indices: Device, gap: int) -> tuple[Device, Device, Device]:
    return _written(indices, None, gap)[:3]


def _written(indices: Device, values: Device | None, gap: int) -> tuple[Device, Device, Device, Device]:
    """Starts, lengths, and the indices and values of all elements inside the blocks; without values, no values."""
    xp, count, dtype = array_module(indices), indices.size, np.float32 if values is None else values.dtype
    if count == 0:
        return xp.empty(0, u32), xp.empty(0, u32), indices, xp.empty(0, dtype)
    totals, end = cleared(xp, 2, u64), counter(xp)
    for_each(xp, _FILE, "stream_count", count, indices, count, u32(gap), totals)
    blocks, covered = (int(total) for total in totals.get())
    _check_count(covered)
    starts, lengths, firsts = (xp.empty(blocks, u32) for _ in range(3))
    support = indices if covered == count else xp.empty(covered, u32)
    out = None if values is None else cleared(xp, covered, dtype)
    for_each(
        xp, _FILE, f"stream_write_{suffix(dtype)}", count, indices, values, count, u32(gap), scan_status(xp, count),
        end, starts, firsts, NULL if support is indices else support, out,
    )  # fmt: skip
    for_each(xp, _FILE, "stream_lengths", blocks, firsts, end, lengths)
    return starts, lengths, support, out


@operation()
def check_blocks(starts: U32, lengths: U32, begin: int, end: int, count: int) -> None:
    """Checks blocks that come from the wire.

    On a GPU, the host waits for the result of the check, unless checks are deferred.

    Raises:
        ValueError: there are more starts than lengths, or fewer; a block is empty, overlaps another, is out of order or
            not within [begin, end); or the blocks do not cover ``count`` elements.
    """
    _check_pairs(starts, lengths)
    if _stream_check(starts, lengths, starts.size, begin, end, count):
        raise broken_blocks(begin, end, count)


@check_blocks.cuda
def _(starts: Device, lengths: Device, begin: int, end: int, count: int) -> None:
    if state.encoding is not None:
        return  # this process has encoded the stream
    _check_pairs(starts, lengths)
    xp, blocks = array_module(starts), starts.size
    if not blocks:
        if count:
            raise broken_blocks(begin, end, count)
        return
    error, sums = cleared(xp, 1, i32), cleared(xp, 2, u64)
    launch(xp, _FILE, "stream_check", grid(xp, blocks), starts, lengths, blocks, begin, end, count, sums, error)
    if state.errors is not None:
        check_later(error)
    elif read_counter(error):
        raise broken_blocks(begin, end, count)


@operation()
def indices(starts: U32, lengths: U32, count: int) -> U32:
    """The indices of the ``count`` elements that the blocks cover: uint32 ``[count]``."""
    out = np.empty(count, np.uint32)
    _stream_indices(starts, lengths, starts.size, out)
    return out


@indices.cuda
def _(starts: Device, lengths: Device, count: int) -> Device:
    xp = array_module(starts)
    out = xp.empty(count, u32)
    for_each(xp, _FILE, "stream_indices", count, starts, _firsts(xp, lengths), starts.size, count, out)
    return out


def nonzero(starts: U32, lengths: U32, values: Floats) -> tuple[U32, Floats]:
    """The indices, uint32, and the values of the covered elements that are not zero. On the host only."""
    indices, out = np.empty(values.size + 1, np.uint32), np.empty(values.size + 1, values.dtype)
    kept = _stream_nonzero[values.dtype](starts, lengths, starts.size, values, indices, out)
    return indices[:kept], out[:kept]


@operation()
def to_dense(starts: U32, lengths: U32, values: Floats, begin: int, out: Floats) -> None:
    """``out`` = the elements ``begin`` to ``begin + out.size - 1``. All blocks must be within them."""
    _stream_dense[values.dtype](starts, lengths, starts.size, values, begin, begin + out.size, out)


@to_dense.cuda
def _(starts: Device, lengths: Device, values: Device, begin: int, out: Device) -> None:
    out.fill(0)
    _scatter(starts, lengths, values, begin, False, out)


@operation()
def add_to(starts: U32, lengths: U32, values: Floats, dense: Floats) -> None:
    """``dense`` += the stream. All blocks must be within ``dense``."""
    _stream_add[values.dtype](starts, lengths, starts.size, values, dense)


@add_to.cuda
def _(starts: Device, lengths: Device, values: Device, dense: Device) -> None:
    _scatter(starts, lengths, values, 0, True, dense)


def merge(a: tuple[U32, U32, Floats], b: tuple[U32, U32, Floats], gap: int) -> tuple[U32, U32, Floats]:
    """The sum of two streams, on the host only.

    Args:
        a, b: streams (starts, lengths, values) of one dtype.
        gap: blocks with at most so many elements between them are joined.
    """
    blocks = a[0].size + b[0].size
    starts, lengths = np.empty(blocks + 16, np.uint32), np.empty(blocks + 16, np.uint32)
    out = np.empty(a[2].size + b[2].size + gap * (blocks + 1) + 16, a[2].dtype)
    count = c_uint64()
    joined = _stream_merge[out.dtype](
        a[0], a[1], a[2], a[0].size, a[2].size, b[0], b[1], b[2], b[0].size, b[2].size, gap, starts, lengths, out,
        byref(count),
    )  # fmt: skip
    return starts[:joined], lengths[:joined], out[: count.value]


def split(starts: U32, lengths: U32, cuts: U64) -> tuple[U32, U32, U64, U64]:
    """Cuts a stream before each cut, on the host only; a block across a cut becomes two. The values are not moved.

    Args:
        cuts: uint64 ``[c]``, sorted; a cut may occur twice.

    Returns:
        starts, lengths: of the new blocks.
        block_at, value_at: uint64 ``[c + 2]``; piece p, of c + 1, has the new blocks ``block_at[p]`` to
            ``block_at[p + 1] - 1`` and the values ``value_at[p]`` to ``value_at[p + 1] - 1``.
    """
    room = starts.size + cuts.size
    out_starts, out_lengths = np.empty(room, np.uint32), np.empty(room, np.uint32)
    block_at, value_at = np.empty(cuts.size + 2, np.uint64), np.empty(cuts.size + 2, np.uint64)
    _stream_split(starts, lengths, starts.size, cuts, cuts.size, out_starts, out_lengths, block_at, value_at)
    return out_starts, out_lengths, block_at, value_at


@operation()
def gaps(starts: U32, lengths: U32, begin: int) -> tuple[U32, U32]:
    """Starts and lengths as two rows of increasing numbers for the rice code, uint32 ``[blocks]`` each.

    kernels/densestream/densestream.h says what they are. No block may start before ``begin``.
    """
    skips, ends = np.empty(starts.size, np.uint32), np.empty(starts.size, np.uint32)
    _stream_gaps(starts, lengths, starts.size, begin, skips, ends)
    return skips, ends


@gaps.cuda
def _(starts: Device, lengths: Device, begin: int) -> tuple[Device, Device]:
    xp, blocks = array_module(starts), starts.size
    skips, ends = xp.empty(blocks, u32), xp.empty(blocks, u32)
    for_each(
        xp, _FILE, "stream_gaps", blocks, starts, lengths, blocks, u32(begin), scan_status(xp, blocks), counter(xp),
        skips, ends,
    )  # fmt: skip
    return skips, ends


@operation()
def blocks_of_gaps(skips: U32, ends: U32, begin: int) -> None:
    """The inverse of ``gaps``, in place: ``skips`` becomes the starts, ``ends`` the lengths.

    On a GPU, the host waits for the check of the result, unless checks are deferred.

    Raises:
        ValueError: a start or an end exceeds 32 bits. ``check_blocks`` checks the rest.
    """
    check(_stream_blocks(skips, ends, skips.size, begin))


@blocks_of_gaps.cuda
def _(skips: Device, ends: Device, begin: int) -> None:
    xp, blocks = array_module(skips), skips.size
    starts, lengths, error = xp.empty(blocks, u32), xp.empty(blocks, u32), cleared(xp, 1, i32)
    if blocks:
        launch(xp, _FILE, "stream_blocks", grid(xp, blocks), skips, ends, blocks, u32(begin), starts, lengths, error)
        skips[:], ends[:] = starts, lengths
        check_later(error)
