"""Top-k, Rice and QSGD in one call, for float32; kernels/fused/. On a GPU, decoding in one set of launches."""

from __future__ import annotations

from ctypes import byref, c_uint64
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_deepreduce.ops import arrays
from hvd_deepreduce.ops.device import THREADS, array_module, grid, launch
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import NOT_FINITE, NonFiniteError, address, kernel
from hvd_deepreduce.ops.pieces import Pieces, table_of
from hvd_deepreduce.ops.program import Program
from hvd_deepreduce.ops.rice_blocks import blocks_of
from hvd_deepreduce.ops.types import F32, U8, Device, u32, u64

Table = NDArray[Any]
TENSOR = np.dtype([("begin", "u8"), ("end", "u8"), ("salt", "u8")])
"""A tensor of a message: its elements of the vector, and the salt of its checksum."""
SETTINGS = np.dtype([("form", "u4"), ("bits", "u4"), ("bucket_size", "u8"), ("l2", "u4"), ("blocks", "u4")])
"""What the containers have in common: the form in their headers, QSGD's settings, and whether the index codec is
``rice_blocks`` (1) or ``rice`` (0). On a GPU, 1 bit stands for signs, and a bucket size of 0 for all values."""

_bound = kernel("fused_bound", "U", "UUP")
_encode = kernel("fused_encode", "I", "PPPPUUUPuuuuuiip")
_decode = kernel("fused_decode", "I", "PUUpUpPdU*i")
_MOST_BYTES = 1 << 30
"""Of data that is decoded on a GPU: its elements are fewer than 2^32 then."""
_JOB_WORDS = 16
"""Of a job of kernels/fused/fused.cu."""
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
    table = table_of(gradient)
    where, pieces = address(table), table.shape[1]
    kept_in = None if residual is None else address(residual)
    size = _encode(
        kept_in, kept_in if into is None else address(into), where, where + 8 * pieces, pieces, gradient.size, kept,
        common, salt, seed, parameter, step & 0xFFFFFFFF, rank, finite, threads, out,
    )  # fmt: skip
    if size == NOT_FINITE:
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
        The bytes of this rank's containers. ``None``: a byte is not as ``encode`` writes it, or, on a GPU, a container
        is of no element; ``out`` is unchanged then. On a GPU, the host waits once.
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
    xp, rows, size = array_module(data), tensors.tolist(), _rounded(data.size)
    parts = tuple((begin, end) for begin, end, _ in rows)
    if not data.size or size >= _MOST_BYTES or any(begin == end for begin, end in parts):
        return None
    program = _recorded(xp, ranks, size, parts, settings.tolist()[0], rank, out.size)
    table = np.array([(end - begin, salt) for begin, end, salt in rows], u64).reshape(-1)
    (bad, own, error), _ = program.run((data, out), (data.size, scale), table)
    return None if bad or error else int(own)


def _rounded(size: int) -> int:
    """At least ``size``, and up to an eighth more, so that messages of about the same size have one program."""
    step = max(4096, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step


@lru_cache(1000)
def _recorded(
    xp: Any, ranks: int, size: int, parts: tuple[tuple[int, int], ...], settings: tuple[int, ...], rank: int, numel: int
) -> Program:
    """The launches of ``decode``, for up to ``size`` bytes of data. The device reads the headers."""
    program, containers = Program(xp), ranks * len(parts)
    form, bits, bucket_size, _, of_blocks = settings
    data, out = program.input(size, np.uint8), program.input(numel, np.float32)
    bytes_there, scale = program.scalar(u64), program.scalar(np.float32)
    table, state = program.given(2 * len(parts), u64), program.zeros(3, u64)
    # The most elements that the bytes can be of: one takes a bit of the index section, and `bits` of the value section.
    elements = 8 * size // (bits + 1) + 4 * containers
    blocks = blocks_of(elements) + containers
    words = 10 * containers + size // _TILE + elements // THREADS + blocks // THREADS
    jobs, scratch = program.empty(_JOB_WORDS * containers, u64), program.zeros(words, u64)
    highs, indices, values = (program.empty(elements, dtype) for dtype in (u32, u32, np.float32))
    # What the largest tensor's container has, if all elements of the tensors are as likely to be sent.
    share = max(end - begin for begin, end in parts) / sum(end - begin for begin, end in parts) / ranks
    each = grid(program, int(size * share) + 1, _TILE)
    blocks_of_all, file, each_of, common = containers * each, "fused/fused", u64(each), (u32(bits), bucket_size)
    launch(
        program, file, "fused_jobs", 1, data, bytes_there, u32(ranks), u32(len(parts)), table, u32(form), *common,
        u32(rank), jobs, state,
    )  # fmt: skip
    if of_blocks:
        places = program.empty(blocks, u64)
        launch(program, file, "fused_places", blocks_of_all, data, jobs, each_of, scratch, places, state)
        launch(program, file, "fused_blocks_highs", blocks_of_all, data, jobs, each_of, scratch, highs, state)
        launch(
            program, file, "fused_blocks_join", blocks_of_all, data, jobs, each_of, scratch, places, highs, indices,
            state,
        )  # fmt: skip
    else:
        launch(program, file, "fused_highs", blocks_of_all, data, jobs, each_of, scratch, highs, state)
        launch(program, file, "fused_join", blocks_of_all, data, jobs, each_of, scratch, highs, indices, state)
    launch(program, file, "fused_values", blocks_of_all, data, jobs, each_of, *common, scratch, values, state)
    for number, (begin, end) in enumerate(parts):
        tiles = -(-(end - begin) // arrays.SUM_TILE)
        for first in range(0, ranks, arrays.SUM_PARTS):
            now, last = min(ranks - first, arrays.SUM_PARTS), first + arrays.SUM_PARTS >= ranks
            starts = program.empty(now * (tiles + 1), u32)
            launch(
                program, file, "fused_sum_starts", now * grid(program, int(elements * share) + 1), u32(now), jobs,
                u32(first * len(parts) + number), u32(len(parts)), indices, tiles, starts, state,
            )  # fmt: skip
            launch(
                program, file, "fused_sum", tiles, out[begin:end], end - begin, scale if last else np.float32(1),
                first > 0, u32(now), indices, values, starts, state,
            )  # fmt: skip
    program.end(state)
    return program
