"""TODO huffman."""

from __future__ import annotations

import numpy as np

from hvd_deepreduce.ops import bits, strings
from hvd_deepreduce.ops.deferred import check_later, counter, read_counter
from hvd_deepreduce.ops.device import array_module, grid, i32, launch, scan_status, u32, u64
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import address, check, kernel
from hvd_deepreduce.ops.types import U8, U32, Device

_huffman_bound = kernel("huffman_bound", "U", "U")
_huffman_encode = kernel("huffman_encode", "U", "pUp")
_huffman_decode = kernel("huffman_decode", "I", "pUUp")
_huffman_indices_encode = kernel("huffman_indices_encode", "U", "pUUp")
_huffman_indices_decode = kernel("huffman_indices_decode", "I", "pUUUp")


@operation()
def encode(symbols: U8) -> U8:
    """The section of symbols drawn in kernels/huffman/huffman.cpp.

    On a GPU: waits for the device: the size is not known before.
    """
    out = np.empty(_huffman_bound(symbols.size), np.uint8)
    return out[: _huffman_encode(address(symbols), symbols.size, address(out))].copy()


@encode.cuda
def _(symbols: Device) -> Device:
    xp, n, file = array_module(symbols), symbols.size, "entropy/codes"
    if n == 0:
        return xp.empty(0, np.uint8)
    words, out = xp.empty(256, u32), xp.zeros((128 + 12 + (n * 12 + 7) // 8 + 64) // 4, u32)
    bits, single, sums, unused, end = (
        xp.zeros(size, dtype) for size, dtype in ((1, u64), (1, u32), (4, u64), (1, u64), (1, u64))
    )
    launch(xp, file, "huffman_plan", 1, strings.histogram(xp, symbols), u64(n), words, out, bits, single)
    launch(xp, file, "huffman_sizes", grid(xp, n), symbols, u64(n), words, sums)
    launch(
        xp, file, "huffman_write", grid(xp, n), symbols, u64(n), words, sums, bits, single, scan_status(xp, n),
        unused, out, end,
    )  # fmt: skip
    return out.view(np.uint8)[: (read_counter(end) + 7) // 8]


@operation()
def decode(section: U8, count: int) -> U8:
    """The symbols of ``huffman_encode``.

    On a GPU: waits for the device.
    """
    symbols = np.empty(count, np.uint8)
    check(_huffman_decode(address(section), section.size, count, address(symbols)))
    return symbols


@decode.cuda
def _(section: Device, count: int) -> Device:
    xp, file, size = array_module(section), "entropy/codes", section.size
    symbols, error = xp.empty(count, np.uint8), xp.zeros(1, i32)
    if count == 0:
        check(-3 if size else 0)
        return symbols
    table, streams, chunks = xp.zeros(4096, np.uint16), xp.zeros(10, u64), max(1, strings.count_chunks(section))
    launch(xp, file, "huffman_read", 1, section, u64(size), u64(count), table, streams, error)
    for number in range(4 if count >= 1024 else 1):
        exits = xp.zeros(chunks * 12, u64)
        launch(xp, file, "huffman_walk", grid(xp, exits.size), section, streams, u32(number), table, u64(chunks), exits)
        starts, words = strings.join_chunks(xp, exits, 12, chunks)
        launch(
            xp, file, "huffman_take", grid(xp, chunks), section, streams, u32(number), table, u64(chunks), starts,
            words, u64(count), symbols, error,
        )  # fmt: skip
    check_later(error)
    return symbols


@operation()
def encode_indices(indices: U32, numel: int) -> U8:
    """The section of indices drawn in kernels/huffman/huffman.cpp.

    On a GPU: waits for the device: the size is not known before.
    """
    out = np.empty(6 * indices.size + 8, np.uint8)
    return out[: _huffman_indices_encode(address(indices), indices.size, numel, address(out))].copy()


@encode_indices.cuda
def _(indices: Device, numel: int) -> Device:
    xp, n, file = array_module(indices), indices.size, "entropy/codes"
    words, table, end = xp.empty(256, u32), xp.zeros(4096, np.uint16), counter(xp)
    out = xp.zeros((6 * n + 11) // 4, u32)
    if n:
        launch(xp, file, "byte_code", 1, u64(numel), words, table)
        launch(xp, file, "huffman_indices_write", grid(xp, n), indices, u64(n), words, scan_status(xp, n), end, out)
    return out.view(np.uint8)[: (read_counter(end) + 7) // 8]


@operation()
def decode_indices(section: U8, numel: int, count: int) -> U32:
    """The indices of ``huffman_indices_encode``.

    On a GPU: waits for the device.
    """
    indices = np.empty(count, np.uint32)
    check(_huffman_indices_decode(address(section), section.size, count, numel, address(indices)))
    return indices


@decode_indices.cuda
def _(section: Device, numel: int, count: int) -> Device:
    xp, file, size = array_module(section), "entropy/codes", section.size
    if count == 0 or numel == 1:  # the only index there is takes no bits
        check(-3 if size else -2 if count > 1 else 0)
        return xp.zeros(count, u32)
    if 8 * size < count:
        check(-1)
    words, table, chunks = xp.empty(256, u32), xp.zeros(4096, np.uint16), strings.count_chunks(section)
    octets, error, exits = xp.empty(4 * count, np.uint8), xp.zeros(1, i32), xp.empty(chunks * 48, u64)
    launch(xp, file, "byte_code", 1, u64(numel), words, table)
    launch(xp, file, "huffman_indices_walk", grid(xp, exits.size), section, u64(size), table, u64(chunks), exits)
    starts, total = strings.join_chunks(xp, exits, 48, chunks)
    launch(
        xp, file, "huffman_indices_take", grid(xp, chunks), section, u64(size), table, u64(chunks), starts, total,
        u64(count), octets, error,
    )  # fmt: skip
    check_later(error)
    indices = octets.view(u32)
    bits.check_indices(indices, numel)
    return indices
