"""Random rotation of buckets of values, and its inverse; kernels/rotation/rotation.h draws it.

The rotation depends on (seed, parameter, step), so a receiver can undo it.
"""

from __future__ import annotations

import numpy as np

from hvd_deepreduce.ops.device import array_module, grid, key_words, launch
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import kernel
from hvd_deepreduce.ops.types import F32, Device, f32, f64, u32

rotated_count = kernel("rotated_count", "U", "UU")
"""The number of rotated values of (count, bucket size): the last bucket is filled up to a power of two."""
_rotate = kernel("rotate", "I", "pUUuuup")
_unrotate = kernel("unrotate", "I", "pUUuuup")
_FILE = "rotation/rotation"
_FIRST, _NEXT = 12, 8
"""The most levels of the first launch, and of each later one, whose tiles have pieces of 16 places then."""
_TILE = 1 << _FIRST
"""Places of a tile, as in kernels/rotation/rotation.cu."""


def _check_memory(result: int, count: int) -> None:
    if result:
        raise MemoryError(f"not enough memory to rotate {count} values")


@operation()
def rotate(values: F32, bucket_size: int, seed: int, parameter: int, step: int) -> F32:
    """The rotated values: float32 ``[rotated_count(n, bucket_size)]``, with the l2 norm of the values in each bucket.

    Args:
        values: float32 ``[n]``, finite.
        bucket_size: a power of two.

    Raises:
        MemoryError: the host has too little memory for a bucket.
    """
    rotated = np.empty(rotated_count(values.size, bucket_size), np.float32)
    if values.size:
        _check_memory(_rotate(values, values.size, bucket_size, seed, parameter, step, rotated), values.size)
    return rotated


@rotate.cuda
def _(values: Device, bucket_size: int, seed: int, parameter: int, step: int) -> Device:
    rotated = array_module(values).empty(rotated_count(values.size, bucket_size), f32)
    _launch("rotate", values, values.size, rotated.size, bucket_size, key_words(seed, parameter, step), rotated)
    return rotated


@operation()
def unrotate(rotated: F32, count: int, bucket_size: int, seed: int, parameter: int, step: int) -> F32:
    """The ``count`` values that ``rotate`` has rotated: float32.

    Args:
        rotated: float32 ``[rotated_count(count, bucket_size)]``, finite.
        bucket_size: a power of two.

    Raises:
        MemoryError: the host has too little memory for a bucket.
    """
    values = np.empty(count, np.float32)
    if count:
        _check_memory(_unrotate(rotated, count, bucket_size, seed, parameter, step, values), count)
    return values


@unrotate.cuda
def _(rotated: Device, count: int, bucket_size: int, seed: int, parameter: int, step: int) -> Device:
    values = array_module(rotated).empty(count, f32)
    _launch("unrotate", rotated, count, rotated.size, bucket_size, key_words(seed, parameter, step), values)
    return values


def _launch(
    name: str, given: Device, count: int, places: int, bucket_size: int, key: tuple[np.uint32, ...], out: Device
) -> None:
    """Launches a kernel for all levels, some at a time; kernels/rotation/rotation.cu draws its tiles."""
    if not count:
        return
    xp, done = array_module(given), 0
    levels = (min(bucket_size, places) - 1).bit_length()
    work = xp.empty(places, f64) if levels > _FIRST else None
    while True:
        now = min(levels - done, _NEXT if done else _FIRST)
        columns = _FIRST - now if done else 0  # as a power of two
        tiles = -(-places // (_TILE << done - columns)) << done - columns
        last = done + now == levels
        launch(
            xp, _FILE, name, grid(xp, tiles, 1), given, count, places, bucket_size, *key, u32(done), u32(columns),
            u32(now), tiles, last, work, out,
        )  # fmt: skip
        if last:
            return
        done += now
