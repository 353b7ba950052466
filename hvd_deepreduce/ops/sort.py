"""Stable sorts; kernels/sort/."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvd_deepreduce.ops.deferred import check_later
from hvd_deepreduce.ops.device import THREADS, array_module, cleared, for_each, grid, launch
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import check, kernel
from hvd_deepreduce.ops.types import F32, U32, Device, f32, i32, u32, u64

_sort_by_key = kernel("sketch_merge", "I", "ppUUpp")
_sort_values = kernel("sort_values", "v", "pUppp")

_FILE = "sort/sort"
_TILE = 8 * THREADS
"""Words of a tile, as in kernels/sort/sort.cu."""


def radix_sort(xp: Any, words: Device, low: int, high: int) -> Device:
    """The words sorted by the bits ``low`` to ``high - 1``; words that are equal in these keep their order.

    Args:
        xp: the array module.
        words: uint64, fewer than 2^32; its memory is used and holds anything afterwards.
        low: a bit.
        high: a bit, at most ``low + 32``; the last of the launches, of 8 bits each, may go beyond it.
    """
    passes, tiles, count = -(-(high - low) // 8), -(-words.size // _TILE), words.size
    if not passes:
        return words
    each, spare = 256 * tiles + 1, xp.empty(count, u64)
    counts, status = cleared(xp, 256 * passes, u32), xp.empty(passes * each, u64)
    for_each(
        xp, _FILE, "radix_count", count, words, count, u32(low), u32(passes), counts, status, status.size, tile=_TILE
    )
    for number in range(passes):
        for_each(
            xp, _FILE, "radix_pass", count, words, count, u32(low + 8 * number), counts[256 * number :],
            status[each * number : each * (number + 1)], spare, tile=_TILE,
        )  # fmt: skip
        words, spare = spare, words
    return words


def _sort_pairs(array: Device, pair: str, unpair: str, width: int = 32) -> tuple[Device, Device]:
    """The elements in the order of their pairs, and their places.

    Args:
        array: 32-bit elements.
        pair: the kernel that makes the pairs.
        unpair: the kernel that reads elements and places from the sorted pairs.
        width: the bits of a pair's upper half that may be set.
    """
    xp, n = array_module(array), array.size
    ordered, places, pairs = xp.empty(n, array.dtype), xp.empty(n, u32), xp.empty(n, u64)
    if n:
        for_each(xp, _FILE, pair, n, array, n, pairs)
        pairs = radix_sort(xp, pairs, 32, 32 + width)
        for_each(xp, _FILE, unpair, n, pairs, n, ordered, places)
    return ordered, places


@operation()
def by_value(values: F32) -> tuple[F32, U32]:
    """The values from the largest to the smallest. Equal values keep their order; 0 and -0 are equal.

    Returns:
        ordered: the sorted values. A -0 has become 0.
        order: uint32, the place in ``values`` of each.
    """
    ordered, order = np.empty(values.size, np.float32), np.empty(values.size, np.uint32)
    scratch = np.empty(2 * values.size, np.uint64)
    _sort_values(values, values.size, scratch, ordered, order)
    return ordered, order


@by_value.cuda
def _(values: Device) -> tuple[Device, Device]:
    return _sort_pairs(values, "value_pairs", "value_unpair")


@operation()
def by_index(indices: U32, width: int) -> tuple[U32, U32]:
    """The indices from the smallest to the largest. Equal indices keep their order.

    Args:
        indices: uint32, below ``2^width``.
        width: bits.

    Returns:
        ordered: the sorted indices.
        places: uint32, the place in ``indices`` of each.
    """
    places = np.argsort(indices, kind="stable").astype(np.uint32)
    return indices[places], places


@by_index.cuda
def _(indices: Device, width: int) -> tuple[Device, Device]:
    return _sort_pairs(indices, "index_pairs", "index_unpair", width)


@operation()
def by_key(keys: U32, values: F32, numel: int) -> tuple[U32, F32]:
    """The pairs of keys, uint32 ``[n]``, and values, float32 ``[n]``, sorted by key.

    On a GPU, the host waits for the check of the keys, unless checks are deferred.

    Raises:
        MemoryError: the host has too little memory to sort the keys.
        ValueError: two keys are equal, or a key is not below ``numel``.
    """
    sorted_keys, sorted_values = np.empty_like(keys), np.empty_like(values)
    result = _sort_by_key(keys, values, keys.size, numel, sorted_keys, sorted_values)
    if result == 1:
        raise MemoryError(f"not enough memory to sort {keys.size} keys")
    check(result)
    return sorted_keys, sorted_values


@by_key.cuda
def _(keys: Device, values: Device, numel: int) -> tuple[Device, Device]:
    xp, n = array_module(keys), keys.size
    sorted_keys, sorted_values = xp.empty(n, u32), xp.empty(n, f32)
    pairs, error = xp.empty(n, u64), cleared(xp, 1, i32)
    if n:
        for_each(xp, _FILE, "key_pairs", n, keys, values, n, pairs)
        # Keys that have more bits than numel - 1 are an error, in any order.
        pairs = radix_sort(xp, pairs, 32, 32 + min(32, (numel - 1).bit_length()))
        launch(xp, _FILE, "key_unpair", grid(xp, n), pairs, n, numel, sorted_keys, sorted_values, error)
        check_later(error)
    return sorted_keys, sorted_values
