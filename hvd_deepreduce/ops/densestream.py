"""TODO densestream."""

from __future__ import annotations

from ctypes import byref, c_uint64
from typing import Any

import numpy as np

from hvd_deepreduce.ops.deferred import check_later, counter, read_counter, state
from hvd_deepreduce.ops.device import array_module, grid, i32, launch, scan_status, suffix, u32, u64
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import address, check, kernel, kernels_by_dtype
from hvd_deepreduce.ops.types import U32, U64, Device, Floats

MOST = 2**31 - 1
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
        raise ValueError(f"a stream on a GPU covers fewer than 2^31 elements, and this one up to {count}: split it")


def _firsts(xp: Any, lengths: Device) -> Device:
    """The place of each block's first value."""
    firsts = xp.empty(lengths.size, u32)
    if lengths.size:
        launch(
            xp, "densestream/densestream", "stream_firsts", grid(xp, lengths.size), lengths, u64(lengths.size),
            scan_status(xp, lengths.size), counter(xp), firsts,
        )  # fmt: skip
    return firsts


def _scatter(starts: Device, lengths: Device, values: Device, begin: int, adds: bool, dense: Device) -> None:
    xp = array_module(starts)
    if values.size:
        launch(
            xp, "densestream/densestream", f"stream_scatter_{suffix(values.dtype)}", grid(xp, values.size), starts,
            _firsts(xp, lengths), u64(starts.size), values, u64(values.size), u64(begin), u32(adds), dense,
        )  # fmt: skip


@operation()
def encode(indices: U32, values: Floats, gap: int) -> tuple[U32, U32, Floats]:
    """Dense blocks of sorted indices: starts, lengths, and the values with the zeros inside blocks written out."""
    covered = c_uint64()
    blocks = _stream_count(address(indices), indices.size, gap, byref(covered))
    starts, lengths = np.empty(blocks, np.uint32), np.empty(blocks, np.uint32)
    out = np.empty(covered.value + gap, values.dtype)
    _stream_encode[values.dtype](
        address(indices), address(values), indices.size, gap, address(starts), address(lengths), address(out),
    )  # fmt: skip
    return starts, lengths, out[: covered.value]


@encode.cuda
def _(indices: Device, values: Device, gap: int) -> tuple[Device, Device, Device]:
    xp, count = array_module(indices), indices.size
    if count == 0:
        return xp.empty(0, u32), xp.empty(0, u32), xp.empty(0, values.dtype)
    totals, end = xp.zeros(2, u64), counter(xp)
    launch(xp, "densestream/densestream", "stream_count", grid(xp, count), indices, u64(count), u32(gap), totals)
    blocks, covered = (int(total) for total in totals.get())
    _check_count(covered)
    starts, lengths, firsts = (xp.empty(blocks, u32) for _ in range(3))
    out = xp.zeros(covered, values.dtype)
    launch(
        xp, "densestream/densestream", f"stream_write_{suffix(values.dtype)}", grid(xp, count), indices, values,
        u64(count), u32(gap), scan_status(xp, count), end, starts, firsts, out,
    )  # fmt: skip
    launch(xp, "densestream/densestream", "stream_lengths", grid(xp, blocks), firsts, end, lengths)
    return starts, lengths, out


@operation()
def check_blocks(starts: U32, lengths: U32, begin: int, end: int, count: int) -> None:
    """``ValueError`` where blocks are empty, overlap, are out of order, leave [begin, end) or do not hold ``count``.

    On a GPU: waits for the device.
    """
    if _stream_check(address(starts), address(lengths), starts.size, begin, end, count):
        raise ValueError(
            f"its blocks are empty, overlap, are out of order, leave the elements {begin} to {end} or do not hold "
            f"{count} values"
        )


@check_blocks.cuda
def _(starts: Device, lengths: Device, begin: int, end: int, count: int) -> None:
    if state.encoding is not None:
        return  # the stream was made just now
    xp, blocks = array_module(starts), starts.size
    error, total = xp.zeros(1, i32), counter(xp)
    if blocks:
        launch(
            xp, "densestream/densestream", "stream_check", grid(xp, blocks), starts, lengths, u64(blocks), u64(begin),
            u64(end), error, total,
        )  # fmt: skip
    if read_counter(total) != count or read_counter(error):
        raise ValueError(
            f"its blocks are empty, overlap, are out of order, leave the elements {begin} to {end} or do not hold "
            f"{count} values"
        )


@operation()
def indices(starts: U32, lengths: U32, count: int) -> U32:
    """The indices of the ``count`` elements that blocks cover."""
    indices = np.empty(count, np.uint32)
    _stream_indices(address(starts), address(lengths), starts.size, address(indices))
    return indices


@indices.cuda
def _(starts: Device, lengths: Device, count: int) -> Device:
    xp = array_module(starts)
    indices = xp.empty(count, u32)
    if count:
        launch(
            xp, "densestream/densestream", "stream_indices", grid(xp, count), starts, _firsts(xp, lengths),
            u64(starts.size), u64(count), indices,
        )  # fmt: skip
    return indices


@operation()
def nonzero(starts: U32, lengths: U32, values: Floats) -> tuple[U32, Floats]:
    """The indices and values of the covered elements that are not zero.

    On a GPU: waits for the device: their number is not known before.
    """
    indices, out = np.empty(values.size + 1, np.uint32), np.empty(values.size + 1, values.dtype)
    found = _stream_nonzero[values.dtype](
        address(starts), address(lengths), starts.size, address(values), address(indices), address(out),
    )  # fmt: skip
    return indices[:found], out[:found]


@nonzero.cuda
def _(starts: Device, lengths: Device, values: Device) -> tuple[Device, Device]:
    xp, count = array_module(starts), values.size
    indices, out, found = xp.empty(count, u32), xp.empty(count, values.dtype), counter(xp)
    if count:
        launch(
            xp, "densestream/densestream", f"stream_nonzero_{suffix(values.dtype)}", grid(xp, count), starts,
            _firsts(xp, lengths), u64(starts.size), values, u64(count), scan_status(xp, count), found, indices, out,
        )  # fmt: skip
    kept = read_counter(found)
    return indices[:kept], out[:kept]


@operation()
def to_dense(starts: U32, lengths: U32, values: Floats, begin: int, out: Floats) -> None:
    """``out`` = the elements from ``begin`` on, as many as it holds; no block may leave them."""
    _stream_dense[values.dtype](
        address(starts), address(lengths), starts.size, address(values), begin, begin + out.size, address(out),
    )  # fmt: skip


@to_dense.cuda
def _(starts: Device, lengths: Device, values: Device, begin: int, out: Device) -> None:
    out.fill(0)
    _scatter(starts, lengths, values, begin, False, out)


@operation()
def add_to(starts: U32, lengths: U32, values: Floats, dense: Floats) -> None:
    """``dense += the blocks``."""
    _stream_add[values.dtype](address(starts), address(lengths), starts.size, address(values), address(dense))


@add_to.cuda
def _(starts: Device, lengths: Device, values: Device, dense: Device) -> None:
    _scatter(starts, lengths, values, 0, True, dense)


@operation()
def merge(a: tuple[U32, U32, Floats], b: tuple[U32, U32, Floats], gap: int) -> tuple[U32, U32, Floats]:
    """The sum of two streams (starts, lengths, values).

    On a GPU: waits for the device: its sizes are not known before.
    """
    blocks = a[0].size + b[0].size
    starts, lengths = np.empty(blocks, np.uint32), np.empty(blocks, np.uint32)
    out = np.empty(a[2].size + b[2].size + gap * (blocks + 1) + 4, a[2].dtype)
    count = c_uint64()
    made = _stream_merge[out.dtype](
        address(a[0]), address(a[1]), address(a[2]), a[0].size, a[2].size, address(b[0]), address(b[1]),
        address(b[2]), b[0].size, b[2].size, gap, address(starts), address(lengths), address(out), byref(count),
    )  # fmt: skip
    return starts[:made], lengths[:made], out[: count.value]


@merge.cuda
def _(a: tuple[Device, Device, Device], b: tuple[Device, Device, Device], gap: int) -> tuple[Device, Device, Device]:
    xp, file = array_module(a[0]), "densestream/densestream"
    na, nb = a[0].size, b[0].size
    blocks, most = na + nb, a[2].size + b[2].size + gap * (na + nb)
    _check_count(most)
    starts, lengths, firsts, order, opened = (xp.empty(blocks, u32) for _ in range(5))
    out, end = xp.zeros(most, a[2].dtype), counter(xp)
    if blocks:
        blocks_of, of_a, of_b = grid(xp, blocks), (a[0], a[1], u64(na)), (b[0], b[1], u64(nb))
        launch(xp, file, "stream_order", blocks_of, a[0], u64(na), b[0], u64(nb), order)
        launch(
            xp, file, "stream_join", blocks_of, *of_a, *of_b, u32(gap), order, scan_status(xp, blocks), end, starts,
            firsts, opened,
        )  # fmt: skip
        launch(xp, file, "stream_lengths", blocks_of, firsts, end, lengths)
        place = f"stream_place_{suffix(out.dtype)}"
        for own, places, other in ((a, opened[:na], (a[0], a[1], u64(0))), (b, opened[na:], of_a)):
            if own[2].size:
                launch(
                    xp, file, place, grid(xp, own[2].size), own[0], _firsts(xp, own[1]), u64(own[0].size), own[2],
                    u64(own[2].size), places, starts, firsts, *other, out,
                )  # fmt: skip
    made = read_counter(end)
    return starts[: made >> 31], lengths[: made >> 31], out[: made & MOST]


@operation()
def split(starts: U32, lengths: U32, cuts: U64) -> tuple[U32, U32, U64, U64]:
    """New starts and lengths of the cut blocks, and where each of the ``cuts.size + 1`` pieces has its blocks and its
    values: piece p those from ``at[p]`` to ``at[p + 1]``."""
    room = starts.size + cuts.size
    out_starts, out_lengths = np.empty(room, np.uint32), np.empty(room, np.uint32)
    block_at, value_at = np.empty(cuts.size + 2, np.uint64), np.empty(cuts.size + 2, np.uint64)
    _stream_split(
        address(starts), address(lengths), starts.size, address(cuts), cuts.size, address(out_starts),
        address(out_lengths), address(block_at), address(value_at),
    )  # fmt: skip
    return out_starts, out_lengths, block_at, value_at


@split.cuda
def _(starts: Device, lengths: Device, cuts: Any) -> tuple[Device, Device, Device, Device]:
    xp, blocks, count = array_module(starts), starts.size, cuts.size
    own = xp.asarray(cuts)
    out_starts, out_lengths = xp.zeros(blocks + count, u32), xp.zeros(blocks + count, u32)
    places, made, firsts, total = xp.empty(blocks, u32), counter(xp), xp.empty(blocks, u32), counter(xp)
    block_at, value_at = xp.zeros(count + 2, u64), xp.zeros(count + 2, u64)
    if blocks:
        launch(
            xp, "densestream/densestream", "stream_firsts", grid(xp, blocks), lengths, u64(blocks), scan_status(xp,
            blocks), total, firsts,
        )  # fmt: skip
        launch(
            xp, "densestream/densestream", "stream_split", grid(xp, blocks), starts, lengths, u64(blocks), own,
            u64(count), scan_status(xp, blocks), made, places, out_starts, out_lengths,
        )  # fmt: skip
        launch(
            xp, "densestream/densestream", "stream_pieces", grid(xp, count + 2), starts, lengths, firsts, u64(blocks),
            total, own, u64(count), made, places, block_at, value_at,
        )  # fmt: skip
    return out_starts, out_lengths, block_at, value_at


@operation()
def gaps(starts: U32, lengths: U32, begin: int) -> tuple[U32, U32]:
    """Starts and lengths as the two rows of increasing numbers that are rice-coded."""
    skips, ends = np.empty(starts.size, np.uint32), np.empty(starts.size, np.uint32)
    _stream_gaps(address(starts), address(lengths), starts.size, begin, address(skips), address(ends))
    return skips, ends


@gaps.cuda
def _(starts: Device, lengths: Device, begin: int) -> tuple[Device, Device]:
    xp, blocks = array_module(starts), starts.size
    skips, ends = xp.empty(blocks, u32), xp.empty(blocks, u32)
    if blocks:
        launch(
            xp, "densestream/densestream", "stream_gaps", grid(xp, blocks), starts, lengths, _firsts(xp, lengths),
            u64(blocks), u32(begin), skips, ends,
        )  # fmt: skip
    return skips, ends


@operation()
def blocks_of_gaps(skips: U32, ends: U32, begin: int) -> None:
    """``stream_gaps`` undone in place: the first array becomes the starts, the second the lengths.

    On a GPU: waits for the device.
    """
    check(_stream_blocks(address(skips), address(ends), skips.size, begin))


@blocks_of_gaps.cuda
def _(skips: Device, ends: Device, begin: int) -> None:
    xp, blocks = array_module(skips), skips.size
    starts, lengths, error = xp.empty(blocks, u32), xp.empty(blocks, u32), xp.zeros(1, i32)
    if blocks:
        launch(
            xp, "densestream/densestream", "stream_blocks", grid(xp, blocks), skips, ends, u64(blocks), u32(begin),
            starts, lengths, error,
        )  # fmt: skip
        skips[:], ends[:] = starts, lengths
        check_later(error)
