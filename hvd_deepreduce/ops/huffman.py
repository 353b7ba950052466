"""Canonical Huffman codes, for symbols and for the bytes of indices; kernels/huffman/huffman.cpp draws the sections."""

from __future__ import annotations

import numpy as np

from hvd_deepreduce.ops import bits, entropy
from hvd_deepreduce.ops.deferred import check_later, counter, read_counter
from hvd_deepreduce.ops.device import THREADS, array_module, cleared, for_each, grid, launch, scan_status
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import check, kernel
from hvd_deepreduce.ops.types import U8, U32, Device, i32, u32, u64

bound = kernel("huffman_bound", "U", "U")
"""The most bytes of a section, and of what is stored past its end, for so many symbols."""
_streams = kernel("huffman_streams", "u", "U")
_encode = kernel("huffman_encode", "U", "pUp")
_decode = kernel("huffman_decode", "I", "pUUp")
_indices_bound = kernel("huffman_indices_bound", "U", "U")
_indices_encode = kernel("huffman_indices_encode", "U", "pUUp")
_indices_decode = kernel("huffman_indices_decode", "I", "pUUUp")

_FILE = "huffman/huffman"
PLAN_WORDS, _HEAD_WORDS = 167, 10
"""The sizes of HuffmanPlan and HuffmanStreams in kernels/huffman/, in words of 8 bytes."""


@operation()
def encode(symbols: U8) -> U8:
    """The section of the symbols, empty for none.

    On a GPU, the host waits for the device to learn the size of the section.
    """
    out = np.empty(bound(symbols.size), np.uint8)
    return out[: _encode(symbols, symbols.size, out)].copy()


@encode.cuda
def _(symbols: Device) -> Device:
    xp, n = array_module(symbols), symbols.size
    if n == 0:
        return xp.empty(0, np.uint8)
    out, counts, plan = cleared(xp, -(-bound(n) // 4), u32), cleared(xp, 4 * 256, u64), xp.empty(PLAN_WORDS, u64)
    unused, size = cleared(xp, 1, u64), counter(xp)
    for_each(xp, _FILE, "huffman_count", n, symbols, n, counts, tile=8 * THREADS)
    launch(xp, _FILE, "huffman_plan", 1, counts, n, plan, size)
    for_each(xp, _FILE, "huffman_write", n, symbols, n, plan, scan_status(xp, n), unused, out)
    return out.view(np.uint8)[: read_counter(size)]


@operation()
def decode(section: U8, count: int) -> U8:
    """The ``count`` symbols of a section, uint8.

    On a GPU, the host waits for the result of the check, unless checks are deferred.

    Raises:
        ValueError: an encoder cannot have written the section for ``count`` symbols.
    """
    symbols = np.empty(count, np.uint8)
    check(_decode(section, section.size, count, symbols))
    return symbols


@decode.cuda
def _(section: Device, count: int) -> Device:
    xp, size, entries = array_module(section), section.size, entropy.LONGEST
    symbols, error = xp.empty(count, np.uint8), cleared(xp, 1, i32)
    if count == 0:
        check(-3 if size else 0)
        return symbols
    table, head, chunks = entropy.code_table(xp), cleared(xp, _HEAD_WORDS, u64), max(1, entropy.count_chunks(section))
    launch(xp, _FILE, "huffman_read", 1, section, size, count, table, head, error)
    for stream in range(_streams(count)):
        exits = cleared(xp, chunks * entries, u64)
        for_each(xp, _FILE, "huffman_walk", exits.size, section, head, u32(stream), table, chunks, exits)
        starts, words = entropy.join_chunks(xp, exits, entries, chunks)
        launch(
            xp, _FILE, "huffman_take", grid(xp, chunks), section, head, u32(stream), table, chunks, starts, words,
            count, symbols, error,
        )  # fmt: skip
    check_later(error)
    return symbols


@operation()
def encode_indices(indices: U32, numel: int) -> U8:
    """The section of indices below ``numel``, in the code of the bytes of 0 to ``numel - 1``; empty for none.

    On a GPU, the host waits for the device to learn the size of the section.
    """
    out = np.empty(_indices_bound(indices.size), np.uint8)
    return out[: _indices_encode(indices, indices.size, numel, out)].copy()


@encode_indices.cuda
def _(indices: Device, numel: int) -> Device:
    xp, n = array_module(indices), indices.size
    words, table, end = xp.empty(256, u32), entropy.code_table(xp), counter(xp)
    out = cleared(xp, -(-_indices_bound(n) // 4), u32)
    if n:
        launch(xp, _FILE, "byte_code", 1, numel, words, table)
        for_each(xp, _FILE, "huffman_indices_write", n, indices, n, words, scan_status(xp, n), end, out)
    return out.view(np.uint8)[: (read_counter(end) + 7) // 8]


@operation()
def decode_indices(section: U8, numel: int, count: int) -> U32:
    """The ``count`` indices of a section, uint32.

    On a GPU, the host waits for the result of the check, unless checks are deferred.

    Raises:
        ValueError: an encoder cannot have written the section for ``count`` strictly increasing indices below
            ``numel``.
    """
    indices = np.empty(count, np.uint32)
    check(_indices_decode(section, section.size, count, numel, indices))
    return indices


@decode_indices.cuda
def _(section: Device, numel: int, count: int) -> Device:
    xp, size, entries = array_module(section), section.size, 4 * entropy.LONGEST  # a phase for each byte of an index
    if count == 0 or numel == 1:  # index 0 of one element takes no bits
        check(-3 if size else -2 if count > 1 else 0)
        return cleared(xp, count, u32)
    if 8 * size < count:
        check(-1)
    words, table, chunks = xp.empty(256, u32), entropy.code_table(xp), entropy.count_chunks(section)
    octets, error, exits = xp.empty(4 * count, np.uint8), cleared(xp, 1, i32), xp.empty(chunks * entries, u64)
    launch(xp, _FILE, "byte_code", 1, numel, words, table)
    for_each(xp, _FILE, "huffman_indices_walk", exits.size, section, size, table, chunks, exits)
    starts, total = entropy.join_chunks(xp, exits, entries, chunks)
    launch(
        xp, _FILE, "huffman_indices_take", grid(xp, chunks), section, size, table, chunks, starts, total, count, octets,
        error,
    )  # fmt: skip
    check_later(error)
    indices = octets.view(u32)
    bits.check_indices(indices, numel)
    return indices
