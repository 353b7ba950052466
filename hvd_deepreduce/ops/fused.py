"""Top-k, Rice and QSGD in one call, for float32; kernels/fused/. On a GPU, decoding in one set of launches."""

from __future__ import annotations

from ctypes import byref, c_uint64
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_deepreduce.ops import arrays, sections
from hvd_deepreduce.ops.bits import packed_bytes
from hvd_deepreduce.ops.device import THREADS, array_module, cleared, grid, launch
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.groups import bucket_count
from hvd_deepreduce.ops.library import NonFiniteError, address, kernel
from hvd_deepreduce.ops.pieces import Pieces
from hvd_deepreduce.ops.rice_blocks import blocks_of
from hvd_deepreduce.ops.types import F32, U8, Device, i32, u32, u64

Table = NDArray[Any]
TENSOR = np.dtype([("begin", "u8"), ("end", "u8"), ("salt", "u8")])
"""A tensor of a message: its elements of the vector, and the salt of its checksum."""
SETTINGS = np.dtype([("form", "u4"), ("bits", "u4"), ("bucket_size", "u8"), ("l2", "u4"), ("blocks", "u4")])
"""What the containers have in common: the form in their headers, QSGD's settings, and whether the index codec is
``rice_blocks`` (1) or ``rice`` (0)."""

_bound = kernel("fused_bound", "U", "UUP")
_encode = kernel("fused_encode", "I", "PPPPUUUPuuuuuiip")
_decode = kernel("fused_decode", "I", "PUUpUpPdU*i")
_NOT_FINITE = -7
_QSGD_HEADER = 8
_TILE = 8 * THREADS
"""Bytes of a tile of the highs, as in kernels/common/device.cuh."""


def encode(
    gradient: F32 | Pieces,
    residual: F32 | None,
    into: F32 | None,
    kept: int,
    settings: Table,
    salt: int,
    key: tuple[int, int, int, int],
    finite: bool,
    threads: int = 1,
) -> U8:
    """The container of a gradient, on the host. It is added to the residual, and what is sent is subtracted from that.

    Args:
        gradient: float32, contiguous; it does not change. Without a residual, it is one array.
        residual: float32, contiguous, of the same size; ``None``: no error feedback.
        into: as the residual: what becomes of the residual is written there, and the residual does not change.
            ``None``: it is changed in place.
        kept: how many elements are sent.
        settings: ``SETTINGS`` ``[1]``.
        salt: of the checksum.
        key: seed, parameter, step and rank.
        finite: whether the gradient is known to be finite.

    Raises:
        NonFiniteError: the gradient has NaN or infinity. The residual has not changed then; ``into`` may have.
        MemoryError: the host has too little memory. A part of the gradient may have been added.
    """
    common, (seed, parameter, step, rank) = address(settings), key
    out = np.empty(_bound(gradient.size, kept, common), np.uint8)
    if isinstance(gradient, Pieces):
        table = gradient.table
    else:
        table = np.array(((address(gradient),), (gradient.size,)), np.uint64)
    where, pieces = address(table), table.shape[1]
    kept_in = None if residual is None else address(residual)
    size = _encode(
        kept_in, kept_in if into is None else address(into), where, where + 8 * pieces, pieces, gradient.size, kept,
        common, salt, seed, parameter, step & 0xFFFFFFFF, rank, finite, threads, out,
    )  # fmt: skip
    if size == _NOT_FINITE:
        raise NonFiniteError
    if size < 0:
        raise MemoryError(f"not enough memory to encode a gradient of {gradient.size} elements")
    return out[:size]


@operation()
def decode(
    data: U8, ranks: int, tensors: Table, settings: Table, out: F32, scale: float, rank: int, threads: int = 1
) -> int | None:
    """Writes ``scale * (sum of all ranks' containers, in rank order)`` of each tensor to its slice of ``out``.

    Args:
        data: the containers of the first rank's tensors, then those of the next rank's, and so on.
        tensors: ``TENSOR``.
        settings: as for ``encode``.
        out: float32, contiguous.
        rank: whose bytes are counted.

    Returns:
        The bytes of this rank's containers. ``None``: a byte is not as ``encode`` writes it; ``out`` is unchanged then.
        On a GPU, the host waits for the headers, unless they were prefetched, and for the checks.
    """
    own = c_uint64()
    failed = _decode(
        address(data), data.size, ranks, tensors, tensors.size, settings, address(out), scale, rank, byref(own), threads
    )
    return None if failed else own.value


@decode.cuda
def _(
    data: Device, ranks: int, tensors: Table, settings: Table, out: Device, scale: float, rank: int, threads: int = 1
) -> int | None:
    rows, (form, bits, bucket_size, _, of_blocks) = tensors.tolist(), settings.tolist()[0]
    sections.prefetch_short_headers(data, ranks, [end - begin for begin, end, _ in rows], out.itemsize)
    jobs: list[tuple[int, ...]] = []
    at = own = elements = blocks = 0
    words = 1  # the first one has the error
    for number in range(ranks * len(rows)):
        begin, end, salt = rows[number % len(rows)]
        job = _job(data, at, end - begin, form, bits, bucket_size, salt)
        if job is None:
            return None
        size, count, rice_bytes = job[1], job[4], job[6]
        found = words
        of_highs = found + 4
        of_join = of_highs + -(-rice_bytes // _TILE) + 1
        of_places = of_join + -(-count // THREADS) + 1
        words = of_places + (-(-blocks_of(count) // THREADS) + 1 if of_blocks else 0)
        jobs.append((*job, elements, found, of_highs, of_join, blocks, of_places))
        elements += -(-count // 4) * 4  # so that four values are stored at once
        blocks, at = blocks + blocks_of(count), at + size
        own += size if number // len(rows) == rank else 0
    if at != data.size:
        return None
    parts = [(job[10], job[10] + job[4]) for job in jobs]
    xp = array_module(data)
    there, scratch = xp.asarray(np.array(jobs, u64).reshape(-1)), cleared(xp, words, u64)
    error = scratch[:1].view(i32)[:1]
    lists, values = xp.empty(2 * elements, u32), xp.empty(elements, np.float32)
    highs, indices = lists[:elements], lists[elements:]
    each = grid(xp, max(job[1] for job in jobs), _TILE)
    size, file, each_of = len(jobs) * each, "fused/fused", u64(each)
    if of_blocks:
        places = xp.empty(blocks, u64)
        launch(xp, file, "fused_places", size, data, there, each_of, scratch, places, error)
        launch(xp, file, "fused_blocks_highs", size, data, there, each_of, scratch, highs)
        launch(xp, file, "fused_blocks_join", size, data, there, each_of, scratch, places, highs, indices, error)
    else:
        launch(xp, file, "fused_highs", size, data, there, each_of, scratch, highs)
        launch(xp, file, "fused_join", size, data, there, each_of, scratch, highs, indices, error)
    launch(xp, file, "fused_values", size, data, there, each_of, u32(bits), bucket_size, scratch, values, error)
    if int(error.get()[0]):
        return None
    for number, (begin, end, _) in enumerate(rows):
        of_ranks = [(indices[i:j], values[i:j]) for i, j in parts[number :: len(rows)]]
        arrays.sum_into(out[begin:end], of_ranks, scale)
    return own


def _job(
    data: Device, at: int, numel: int, form: int, bits: int, bucket_size: int, salt: int
) -> tuple[int, ...] | None:
    """What the kernels must know of the container that begins at a byte of ``data``: the job of kernels/fused/fused.cu,
    up to ``code_bytes``. ``None``: its header is not as ``encode`` writes it."""
    header = sections.peek(data[at:], sections.HEADER_BYTES)
    if len(header) < 5 or header[4] != form:
        return None
    try:
        count, next_at = sections.read_varint(header, 5)
        rice_bytes, next_at = sections.read_varint(header, next_at)
        value_bytes, next_at = sections.read_varint(header, next_at)
    except ValueError:
        return None
    rice = at + next_at
    norms = rice + rice_bytes + _QSGD_HEADER
    codes, code_bytes = norms + 4 * bucket_count(count, bucket_size), packed_bytes(count, bits)
    end = codes + code_bytes
    if not 0 < count <= numel or 8 * rice_bytes < count or value_bytes != _QSGD_HEADER + end - norms or end > data.size:
        return None  # an empty support, too: it is rare, and the composed way knows it
    settings = sections.peek(data[norms - _QSGD_HEADER :], _QSGD_HEADER)
    if settings != bytes([bits, 0, 0, 0]) + bucket_size.to_bytes(4, "little"):
        return None
    return at, end - at, salt, numel, count, rice, rice_bytes, norms, codes, code_bytes
