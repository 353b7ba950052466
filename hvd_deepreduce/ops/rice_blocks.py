"""Golomb-Rice code of gaps, with a parameter for each block of them; kernels/rice/blocks.cpp draws the section."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvd_deepreduce.ops import sections
from hvd_deepreduce.ops.deferred import check_later, counter
from hvd_deepreduce.ops.device import THREADS, array_module, cleared, for_each, grid, launch
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import check, check_room, kernel
from hvd_deepreduce.ops.sections import Job, cut
from hvd_deepreduce.ops.types import U8, U32, Device, i32, u32, u64

BLOCK = 64
"""The gaps of a block, as in kernels/rice/rice.h."""
_plan = kernel("rice_blocks_plan", "U", "pUp")
_bound = kernel("rice_blocks_bound", "U", "UU")
_encode = kernel("rice_blocks_encode", "v", "pUpp")
_decode = kernel("rice_blocks_decode", "I", "pUUUpp")
_FILE = "rice/blocks"
_TILE = 8 * THREADS
"""Bytes of a tile of the highs, as in kernels/common/device.cuh."""


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
    return sections.encode_many(lists, numels, measured)


def measured(indices: Device, numel: int) -> tuple[Device, Device]:
    """On a GPU, without a wait: room with the section at its begin, and the number of its bits."""
    xp, count = array_module(indices), indices.size
    blocks = blocks_of(count)
    of_blocks, of_gaps = -(-blocks // THREADS) + 1, -(-count // THREADS) + 1
    # One array of zeros, for one launch: | place of the highs | status of the blocks | of the gaps | words of the
    # section, and one more for put_bits |
    words = -(-_bound(count, numel) // 8) + 1
    scratch, bits = cleared(xp, 1 + of_blocks + of_gaps + words, u64), counter(xp)
    begin, status = scratch[:1], scratch[1 + of_blocks : 1 + of_blocks + of_gaps]
    section = scratch[1 + of_blocks + of_gaps :].view(u32)
    parameters, places = xp.empty(blocks, np.uint8), xp.empty(blocks, u64)
    for_each(xp, _FILE, "rice_blocks_parameters", 32 * blocks, indices, count, parameters)
    for_each(xp, _FILE, "rice_blocks_places", blocks, parameters, count, scratch[1 : 1 + of_blocks], places, begin)
    for_each(xp, _FILE, "rice_blocks_write", count, indices, count, parameters, places, begin, status, section, bits)
    return section.view(np.uint8), bits


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
    return decode_all(section, [Job(0, section.size, numel, count)])


def decode_all(data: Device, jobs: Sequence[Job]) -> Device:
    """On a GPU: ``decode`` of sections of ``data``, in one set of launches; the results one behind the other."""
    xp, rows = array_module(data), []
    words, elements, blocks = 1, 0, 0  # the first word has the error
    for job in jobs:
        check_room(job, job.entries)  # an index takes at least one bit
        of_places = words + 3
        of_highs = of_places + -(-blocks_of(job.entries) // THREADS) + 1
        of_join = of_highs + -(-job.size // _TILE) + 1
        rows.append((*job, elements, blocks, words, of_places, of_highs, of_join))
        words = of_join + -(-job.entries // THREADS) + 1
        elements, blocks = elements + job.entries, blocks + blocks_of(job.entries)
    there, scratch = xp.asarray(np.array(rows, u64).reshape(-1)), cleared(xp, words, u64)
    error, lists, places = scratch[:1].view(i32)[:1], xp.empty(2 * elements, u32), xp.empty(blocks, u64)
    highs, indices = lists[:elements], lists[elements:]
    most, many = max(job.entries for job in jobs), len(jobs)
    each = grid(xp, blocks_of(most))
    launch(xp, _FILE, "rice_blocks_read_places", each * many, data, there, each, scratch, places, error)
    each = grid(xp, max(job.size for job in jobs), _TILE)
    launch(xp, _FILE, "rice_blocks_highs", each * many, data, there, each, scratch, highs)
    each = grid(xp, most)
    launch(xp, _FILE, "rice_blocks_join", each * many, data, there, each, scratch, places, highs, indices, error)
    check_later(error)
    return indices


def decode_many(parts: Sequence[U8], numel: int, counts: Sequence[int]) -> list[U32]:
    """``decode`` of several sections; on a GPU in one set of launches, if they were taken apart together."""
    return sections.decode_many(parts, numel, counts, decode, lambda data, jobs: cut(decode_all(data, jobs), jobs))
