"""Bloom filters of indices, and the conflict sets of policy P2; kernels/bloom/bloom.cpp draws the filter.

The hash functions depend on the key (seed, parameter, step) and on the size of the filter.
"""

from __future__ import annotations

import numpy as np

from hvd_deepreduce.ops import bitmap
from hvd_deepreduce.ops.deferred import counter, read_counter
from hvd_deepreduce.ops.device import array_module, grid, key_words, launch, u32, u64
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import address, kernel
from hvd_deepreduce.ops.types import U8, U32, Device

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
    _insert(address(indices), indices.size, hashes, seed, parameter, step, address(bits), size)
    return bits[:size]


@insert.cuda
def _(indices: Device, size: int, hashes: int, seed: int, parameter: int, step: int) -> Device:
    xp, count = array_module(indices), indices.size
    words = xp.zeros(-(-size // 4), u32)
    if count:
        launch(
            xp, "bloom/bloom", "bloom_insert", grid(xp, count * hashes), indices, u64(count), u32(hashes),
            *key_words(seed, parameter, step), u32(size), words,
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
    count = _query(address(wrapped), bits.size, hashes, seed, parameter, step, numel, address(positives))
    return bitmap.decode.host(positives[: (numel + 7) // 8], numel, count)


@query.cuda
def _(bits: Device, hashes: int, numel: int, seed: int, parameter: int, step: int) -> Device:
    xp, size = array_module(bits), bits.size
    words, positives, count = xp.empty((size + 15) // 4, u32), xp.empty(-(-numel // 64), u64), counter(xp)
    if numel:
        launch(xp, "bloom/bloom", "bloom_wrap", grid(xp, words.size), bits, u32(size), words)
        launch(
            xp, "bloom/bloom", "bloom_query", grid(xp, positives.size), words, u32(size), u32(hashes),
            *key_words(seed, parameter, step), u64(numel), positives, count,
        )  # fmt: skip
    indices = xp.empty(read_counter(count), u32)
    if indices.size:
        bitmap.find_ones(xp, positives.view(np.uint8), indices)
    return indices


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
    failed = _conflict_sets(address(positives), positives.size, count, most, hashes, *key, size, address(chosen))
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
