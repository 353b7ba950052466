"""TODO bloom."""

from __future__ import annotations

import numpy as np

from hvd_deepreduce.ops import bitmap
from hvd_deepreduce.ops.bits import find_ones
from hvd_deepreduce.ops.deferred import counter, read_counter
from hvd_deepreduce.ops.device import array_module, grid, key_words, launch, u32, u64
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import address, kernel
from hvd_deepreduce.ops.types import U8, U32, Device

_bloom_insert = kernel("bloom_insert", "v", "pUuuuupU")
_bloom_query = kernel("bloom_query", "U", "pUuuuuUp")
_bloom_conflict_sets = kernel("bloom_conflict_sets", "i", "pUUuuuuUp")


@operation()
def insert(indices: U32, size: int, hashes: int, seed: int, parameter: int, step: int) -> U8:
    """A Bloom filter of ``size`` bytes (8 to 2^29 - 1) that holds the indices."""
    bits = np.zeros(size + 8, np.uint8)
    _bloom_insert(address(indices), indices.size, hashes, seed, parameter, step, address(bits), size)
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
    """The positives: the indices below ``numel`` that the filter holds, falsely or not.

    On a GPU: waits for the device: their number is not known before.
    """
    wrapped = np.concatenate([bits, bits[:8]])
    found = np.empty(-(-numel // 64) * 8, np.uint8)
    count = _bloom_query(address(wrapped), bits.size, hashes, seed, parameter, step, numel, address(found))
    return bitmap.decode(found[: (numel + 7) // 8], numel, count)


@query.cuda
def _(bits: Device, hashes: int, numel: int, seed: int, parameter: int, step: int) -> Device:
    xp, size = array_module(bits), bits.size
    words, positives, found = xp.empty((size + 15) // 4, u32), xp.empty(-(-numel // 64), u64), counter(xp)
    if numel:
        launch(xp, "bloom/bloom", "bloom_wrap", grid(xp, words.size), bits, u32(size), words)
        launch(
            xp, "bloom/bloom", "bloom_query", grid(xp, positives.size), words, u32(size), u32(hashes),
            *key_words(seed, parameter, step), u64(numel), positives, found,
        )  # fmt: skip
    indices = xp.empty(read_counter(found), u32)
    if indices.size:
        find_ones(xp, positives.view(np.uint8), indices)
    return indices


@operation()
def conflict_sets(positives: U32, count: int, size: int, hashes: int, seed: int, parameter: int, step: int) -> U32:
    """Policy P2's ``count`` out of all the positives of a filter of ``size`` bytes.

    On a GPU: runs on the host: every draw hangs on the ones before it.
    """
    chosen = np.empty(count, np.uint32)
    key = (seed, parameter, step)
    if _bloom_conflict_sets(address(positives), positives.size, count, hashes, *key, size, address(chosen)):
        raise MemoryError(f"the conflict sets of {positives.size} positives found no memory")
    return chosen


@conflict_sets.cuda
def _(positives: Device, count: int, size: int, hashes: int, seed: int, parameter: int, step: int) -> Device:
    chosen = conflict_sets.host(positives.get(), count, size, hashes, seed, parameter, step)
    return array_module(positives).asarray(chosen)
