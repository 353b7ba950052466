"""Golomb-Rice code of gaps, with a parameter for each block of them; kernels/rice/blocks.cpp draws the section."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvd_deepreduce.ops.deferred import check_later, counter, read_counters
from hvd_deepreduce.ops.device import THREADS, array_module, cleared, for_each, grid, launch, scan_status
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import check, check_room, kernel
from hvd_deepreduce.ops.types import U8, U32, Device, i32, u32, u64

BLOCK = 64
"""The gaps of a block, as in kernels/rice/rice.h."""
_plan = kernel("rice_blocks_plan", "U", "pUp")
_bound = kernel("rice_blocks_bound", "U", "UU")
_encode = kernel("rice_blocks_encode", "v", "pUpp")
_decode = kernel("rice_blocks_decode", "I", "pUUUpp")
_FILE = "rice/blocks"


def blocks_of(count: int) -> int:
    """The number of blocks of ``count`` gaps."""
    return -(-count // BLOCK)


@operation()
def encode(indices: U32, numel: int) -> U8:
    """The section of at least one index; the indices are strictly increasing and below ``numel``.

    On a GPU, the host waits for the device to learn the size of the section.
    """
    parameters = np.empty(blocks_of(indices.size), np.uint8)
    out = np.empty(_plan(indices, indices.size, parameters), np.uint8)
    _encode(indices, indices.size, parameters, out)
    return out


@encode.cuda
def _(indices: Device, numel: int) -> Device:
    return encode_many([indices], [numel])[0]


@operation()
def encode_many(lists: Sequence[U32], numels: Sequence[int]) -> list[U8]:
    """``encode`` of several lists of indices, each below its number of elements.

    On a GPU, the host waits once for all sizes.
    """
    return [encode.host(indices, numel) for indices, numel in zip(lists, numels, strict=True)]


@encode_many.cuda
def _(lists: Sequence[Device], numels: Sequence[int]) -> list[Device]:
    rooms, sizes = [], []
    for indices, numel in zip(lists, numels, strict=True):
        xp, count = array_module(indices), indices.size
        blocks, status = blocks_of(count), scan_status(xp, count)
        of_blocks = -(-blocks // THREADS) + 1
        # One array of zeros, for one launch: | place of the highs | status of the blocks | of the gaps | words of the
        # section, and one more for put_bits |
        words = -(-_bound(count, numel) // 8) + 1
        scratch, bits = cleared(xp, 1 + of_blocks + status.size + words, u64), counter(xp)
        begin, of_gaps = scratch[:1], scratch[1 + of_blocks : 1 + of_blocks + status.size]
        section = scratch[1 + of_blocks + status.size :].view(u32)
        parameters, places = xp.empty(blocks, np.uint8), xp.empty(blocks, u64)
        for_each(xp, _FILE, "rice_blocks_parameters", 32 * blocks, indices, count, parameters)
        for_each(xp, _FILE, "rice_blocks_places", blocks, parameters, count, scratch[1 : 1 + of_blocks], places, begin)
        for_each(
            xp, _FILE, "rice_blocks_write", count, indices, count, parameters, places, begin, of_gaps, section, bits
        )
        rooms.append(section.view(np.uint8))
        sizes.append(bits)
    return [room[: (bits + 7) // 8] for room, bits in zip(rooms, read_counters(sizes), strict=True)]


@operation()
def decode(section: U8, numel: int, count: int) -> U32:
    """The ``count`` indices of a section, at least one, uint32.

    On a GPU, the host waits for the result of the check, unless checks are deferred.

    Raises:
        ValueError: an encoder cannot have written the section for ``count`` indices below ``numel``.
    """
    check_room(section, count)  # an index takes at least one bit
    indices, parameters = np.empty(count, np.uint32), np.empty(blocks_of(count), np.uint8)
    check(_decode(section, section.size, count, numel, parameters, indices))
    return indices


@decode.cuda
def _(section: Device, numel: int, count: int) -> Device:
    xp = array_module(section)
    check_room(section, count)  # an index takes at least one bit
    blocks, tile = blocks_of(count), 8 * THREADS
    highs, places, indices = xp.empty(count, u32), xp.empty(blocks, u64), xp.empty(count, u32)
    # One array of zeros, for one launch: | ones | end | error | place of the highs | status of the blocks | of the
    # highs | of the gaps |
    of_highs = 4 + -(-blocks // THREADS) + 1
    of_gaps = of_highs + -(-section.size // tile) + 1
    scratch = cleared(xp, of_gaps + -(-count // THREADS) + 1, u64)
    ones, end, error, begin = scratch[:1], scratch[1:2], scratch[2:3].view(i32)[:1], scratch[3:4]
    launch(
        xp, _FILE, "rice_blocks_read_places", grid(xp, blocks), section, section.size, count, scratch[4:of_highs],
        places, begin, error,
    )  # fmt: skip
    for_each(
        xp, _FILE, "rice_blocks_highs", section.size, section, section.size, count, begin, scratch[of_highs:of_gaps],
        highs, ones, tile=tile,
    )  # fmt: skip
    launch(
        xp, _FILE, "rice_blocks_join", grid(xp, count), section, section.size, count, numel, places, begin, highs, ones,
        scratch[of_gaps:], end, indices, error,
    )  # fmt: skip
    check_later(error)
    return indices
