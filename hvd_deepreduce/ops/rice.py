"""Golomb-Rice code of the gaps between sorted indices; kernels/rice/rice.cpp draws the section."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, c_uint64

import numpy as np

from hvd_deepreduce.ops import sections
from hvd_deepreduce.ops.deferred import check_later, counter
from hvd_deepreduce.ops.device import THREADS, array_module, cleared, for_each, grid, launch
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import check, check_room, kernel
from hvd_deepreduce.ops.sections import Job, cut
from hvd_deepreduce.ops.types import U8, U32, Device, i32, u32, u64

_parameter = kernel("rice_parameter", "u", "pUU*")
_bound = kernel("rice_bound", "U", "UU")
_encode = kernel("rice_encode", "v", "pUup")
_decode = kernel("rice_decode", "I", "pUUuUp")
_TILE = 8 * THREADS
"""Bytes of a tile of the highs, as in kernels/common/device.cuh."""


@operation()
def encode(indices: U32, numel: int) -> U8:
    """The section of at least one index; the indices are strictly increasing and below ``numel``.

    On a GPU, the host waits for the device to learn the size of the section.
    """
    size = c_uint64()
    b = _parameter(indices, indices.size, numel, byref(size))
    out = np.empty(size.value, np.uint8)
    out[0] = b
    _encode(indices, indices.size, b, out[1:])
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
    tiles = -(-count // THREADS) + 1
    # One array of zeros, for one launch: | sums [32] | status | words of the section, and one more for put_bits |
    scratch, bits = cleared(xp, 32 + tiles + -(-_bound(count, numel) // 8) + 1, u64), counter(xp)
    sums, status, words = scratch[:32], scratch[32 : 32 + tiles], scratch[32 + tiles :].view(u32)
    for_each(xp, "rice/rice", "rice_sums", count, indices, count, sums)
    for_each(xp, "rice/rice", "rice_write", count, indices, count, numel, sums, status, words, bits)
    return words.view(np.uint8), bits


@operation()
def decode(section: U8, numel: int, count: int) -> U32:
    """The ``count`` indices of a section, at least one, uint32.

    On a GPU, the host waits for the result of the check, unless checks are deferred.

    Raises:
        ValueError: an encoder cannot have written the section for ``count`` indices below ``numel``.
    """
    check_room(section, max(count, 1))  # an index takes at least one bit
    indices = np.empty(count, np.uint32)
    check(_decode(section[1:], section.size - 1, count, int(section[0]), numel, indices))
    return indices


@decode.cuda
def _(section: Device, numel: int, count: int) -> Device:
    return decode_all(section, [Job(0, section.size, numel, count)])


def decode_all(data: Device, jobs: Sequence[Job]) -> Device:
    """On a GPU: ``decode`` of sections of ``data``, in one set of launches; the results one behind the other."""
    xp, rows = array_module(data), []
    words, elements = 1, 0  # the first word has the error
    for job in jobs:
        check_room(job, max(job.entries, 1))
        of_highs = words + 2
        of_join = of_highs + -(-job.size // _TILE) + 1
        rows.append((*job, elements, words, of_highs, of_join))
        words, elements = of_join + -(-job.entries // THREADS) + 1, elements + job.entries
    there, scratch = xp.asarray(np.array(rows, u64).reshape(-1)), cleared(xp, words, u64)
    error, lists = scratch[:1].view(i32)[:1], xp.empty(2 * elements, u32)
    highs, indices = lists[:elements], lists[elements:]
    each = grid(xp, max(job.size for job in jobs), _TILE)
    launch(xp, "rice/rice", "rice_highs", each * len(jobs), data, there, each, scratch, highs)
    each = grid(xp, max(job.entries for job in jobs))
    launch(xp, "rice/rice", "rice_join", each * len(jobs), data, there, each, scratch, highs, indices, error)
    check_later(error)
    return indices


def decode_many(parts: Sequence[U8], numel: int, counts: Sequence[int]) -> list[U32]:
    """``decode`` of several sections; on a GPU in one set of launches, if they were taken apart together."""
    return sections.decode_many(parts, numel, counts, decode, lambda data, jobs: cut(decode_all(data, jobs), jobs))
