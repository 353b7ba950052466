"""Random rotation of buckets of values, and its inverse; kernels/rotation/rotation.h draws it.

The rotation depends on (seed, parameter, step), so a receiver can undo it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hvd_deepreduce.ops.device import array_module, for_each, key_words
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import kernel
from hvd_deepreduce.ops.types import F32, Device, f32, f64

rotated_count = kernel("rotated_count", "U", "UU")
"""The number of rotated values of (count, bucket size): the last bucket is filled up to a power of two."""
_rotate = kernel("rotate", "I", "pUUuuup")
_unrotate = kernel("unrotate", "I", "pUUuuup")
_FILE = "rotation/rotation"


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
    xp, n = array_module(values), values.size
    places = rotated_count(n, bucket_size)
    work, rotated = xp.empty(places, f64), xp.empty(places, f32)
    if n:
        key = key_words(seed, parameter, step)
        for_each(xp, _FILE, "rotation_begin", places, values, n, places, *key, work)
        _hadamard(xp, work, bucket_size)
        for_each(xp, _FILE, "rotation_end", places, work, places, bucket_size, rotated)
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
    xp, places = array_module(rotated), rotated.size
    work, values = xp.empty(places, f64), xp.empty(count, f32)
    if count:
        for_each(xp, _FILE, "rotation_widen", places, rotated, places, work)
        _hadamard(xp, work, bucket_size)
        for_each(
            xp, _FILE, "rotation_back", count, work, count, places, bucket_size, *key_words(seed, parameter, step),
            values,
        )  # fmt: skip
    return values


def _hadamard(xp: Any, work: Device, bucket_size: int) -> None:
    """Multiplies each bucket by the Walsh-Hadamard matrix, in place."""
    half = 1
    while half < min(bucket_size, work.size):
        for_each(xp, _FILE, "rotation_level", (work.size + 1) // 2, work, work.size, half)
        half *= 2
