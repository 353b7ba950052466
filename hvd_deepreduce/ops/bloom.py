"""Bloom filters of indices, and the conflict sets of policy P2; kernels/bloom/bloom.cpp draws the filter.

The hash functions depend on the key (seed, parameter, step) and on the size of the filter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hvd_deepreduce.ops import bitmap
from hvd_deepreduce.ops.deferred import check_later, counter, read_counter
from hvd_deepreduce.ops.device import THREADS, array_module, cleared, for_each, grid, key_words, launch
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import kernel
from hvd_deepreduce.ops.types import U8, U32, Device, i32, u32, u64

_FILE = "bloom/bloom"

_insert = kernel("bloom_insert", "v", "pUuuuupU")
_query = kernel("bloom_query", "U", "pUuuuuUp")
_conflict_sets = kernel("bloom_conflict_sets", "i", "pUUUuuuuUp")

_WINDOW = 8
"""Bytes of a window, which may continue at the start of the filter."""


@operation()
def insert(indices: U32, size: int, hashes: int, seed: int, parameter: int, step: int) -> U8:
    """A Bloom filter of the indices.

    Args:
        indices: any order.
        size: bytes of the filter, 8 to 2^29 - 1.
        hashes: the number of hash functions, 1 to 32.
        seed, parameter, step: the key.
    """
    bits = np.zeros(size + _WINDOW, np.uint8)
    _insert(indices, indices.size, hashes, seed, parameter, step, bits, size)
    return bits[:size]


@insert.cuda
def _(indices: Device, size: int, hashes: int, seed: int, parameter: int, step: int) -> Device:
    xp, count = array_module(indices), indices.size
    words = cleared(xp, -(-size // 4), u32)
    for_each(
        xp, _FILE, "bloom_insert", count * hashes, indices, count, u32(hashes), *key_words(seed, parameter, step),
        u32(size), words,
    )  # fmt: skip
    return words.view(np.uint8)[:size]


@operation()
def query(bits: U8, hashes: int, numel: int, seed: int, parameter: int, step: int) -> U32:
    """The positives: the indices below ``numel`` that the filter holds, true and false ones, sorted.

    On a GPU, the host waits for the device to learn how many there are.

    Args:
        bits: the filter, 8 to 2^29 - 1 bytes.
        hashes: the number of hash functions, 1 to 32.
        numel: below 2^32.
        seed, parameter, step: the key.
    """
    wrapped = np.concatenate([bits, bits[:_WINDOW]])
    positives = np.empty(-(-numel // 64) * 8, np.uint8)
    count = _query(wrapped, bits.size, hashes, seed, parameter, step, numel, positives)
    return bitmap.decode.host(positives[: (numel + 7) // 8], numel, count)


@query.cuda
def _(bits: Device, hashes: int, numel: int, seed: int, parameter: int, step: int) -> Device:
    xp = array_module(bits)
    count = counter(xp)
    positives = _query_all(xp, bits, [Filter(0, bits.size, hashes, 0)], numel, (seed, parameter, step), count, 0)[0]
    indices = xp.empty(read_counter(count), u32)
    if indices.size:
        bitmap.find_ones(xp, positives.view(np.uint8), indices)
    return indices


class Filter(NamedTuple):
    """A filter on a GPU.

    Attributes:
        at, size: its bytes of the data.
        positives: how many it must hold.
    """

    at: int
    size: int
    hashes: int
    positives: int


_TILE = 8 * THREADS
"""Bytes of a tile of a bit string, as in kernels/common/device.cuh."""


def _query_all(
    xp: Any,
    data: Device,
    filters: Sequence[Filter],
    numel: int,
    key: tuple[int, int, int],
    counts: Device,
    found_at: int,
) -> tuple[Device, Device]:
    """A bit for each element and filter, uint64 ``[filters, ceil(numel / 64)]``, and the table of the filters.

    Args:
        counts: uint64, zeros; word ``found_at`` + 2 i will have the number of positives of filter i.
    """
    rows: list[tuple[int, ...]] = []
    blocks = -(-numel // 64)
    words = first = 0
    for number, (at, size, hashes, positives) in enumerate(filters):
        status = 1 + 2 * len(filters) + number * (-(-8 * blocks // _TILE) + 1)
        rows.append((at, size, hashes, positives, words, first, found_at + 2 * number, status))
        words, first = words + (size + 15) // 4, first + positives
    there, wrapped = xp.asarray(np.array(rows, u64).reshape(-1)), xp.empty(words, u32)
    found = xp.empty(blocks * len(filters), u64)
    if numel:
        each = grid(xp, max((one.size + 15) // 4 for one in filters))
        launch(xp, _FILE, "bloom_wrap", each * len(filters), data, there, each, wrapped)
        each = grid(xp, blocks)
        launch(
            xp, _FILE, "bloom_query", each * len(filters), wrapped, there, each, *key_words(*key), numel, found, counts
        )
    return found, there


_AT_ONCE = 8
"""Filters that are queried together, of which each takes a bit for each element."""


def query_many(
    data: Device, filters: Sequence[Filter], numel: int, seed: int, parameter: int, step: int
) -> list[Device]:
    """On a GPU: ``query`` of several filters, eight in one set of launches.

    The host waits for the result of the check, unless checks are deferred.

    Raises:
        ValueError: a filter holds another number of positives than it must.
    """
    found: list[Device] = []
    xp, blocks = array_module(data), -(-numel // 64)
    for begin in range(0, len(filters), _AT_ONCE):
        some = filters[begin : begin + _AT_ONCE]
        # | error | positives and positives again, of each | status words |
        scratch = cleared(xp, 1 + len(some) * (2 + -(-8 * blocks // _TILE) + 1), u64)
        error = scratch[:1].view(i32)[:1]
        positives, there = _query_all(xp, data, some, numel, (seed, parameter, step), scratch, 1)
        indices, each = xp.empty(sum(one.positives for one in some), u32), grid(xp, 8 * blocks, _TILE)
        launch(xp, _FILE, "bloom_find", each * len(some), positives, there, each, numel, scratch, indices, error)
        check_later(error)
        first = 0
        for one in some:
            found.append(indices[first : first + one.positives])
            first += one.positives
    return found


class TooManyConflictsError(ValueError):
    """Conflict sets of more members than a reader takes."""


def most_members(numel: int) -> int:
    """The most members of all conflict sets that are drawn from, for a tensor of ``numel`` elements.

    Bounds the memory of ``conflict_sets``. Filters for random indices give at most ``numel`` with one hash function,
    and 0.75 * ``numel`` with more.
    """
    return min(numel + numel // 4 + 65536, 2**32 - 1)


@operation()
def conflict_sets(
    positives: U32, count: int, most: int, size: int, hashes: int, seed: int, parameter: int, step: int
) -> U32:
    """Policy P2 (DeepReduce, algorithm 1): ``count`` of the positives, sorted.

    On a GPU, the positives are copied to the host, since each draw depends on all draws before it.

    Args:
        positives: all indices that the filter holds, sorted.
        count: at most ``positives.size``.
        most: members of all sets of positives that share each of their bits.
        size: bytes of the filter.
        hashes: the number of hash functions, 1 to 32.
        seed, parameter, step: the key.

    Raises:
        MemoryError: the host has too little memory for the sets.
        TooManyConflictsError: the sets have more than ``most`` members.
    """
    chosen = np.empty(count, np.uint32)
    key = (seed, parameter, step)
    failed = _conflict_sets(positives, positives.size, count, most, hashes, *key, size, chosen)
    if failed == 1:
        raise TooManyConflictsError(f"the conflict sets of its Bloom filter have more than {most} members")
    if failed:
        raise MemoryError(f"not enough memory for the conflict sets of {positives.size} positives of a Bloom filter")
    return chosen


@conflict_sets.cuda
def _(
    positives: Device, count: int, most: int, size: int, hashes: int, seed: int, parameter: int, step: int
) -> Device:
    chosen = conflict_sets.host(positives.get(), count, most, size, hashes, seed, parameter, step)
    return array_module(positives).asarray(chosen)
