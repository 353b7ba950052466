"""Random-k: distinct random indices from a key; kernels/random/random.h defines the permutation."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvd_deepreduce.ops import bitmap
from hvd_deepreduce.ops.device import array_module, cleared, for_each, key_words
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import kernel
from hvd_deepreduce.ops.types import U32, Device, u32

_random_indices = kernel("random_indices", "i", "UUUuuup")


@operation(5)
def indices(numel: int, count: int, seed: int, parameter: int, step: int, like: Any, first: int = 0) -> U32:
    """``count`` distinct indices below ``numel``, sorted; the same on every machine for the same key.

    They are the images of ``first`` to ``first + count - 1`` under a permutation of 0 to ``numel - 1``.

    Args:
        numel: below 2^32.
        count: at most ``numel - first``.
        seed, parameter, step: the key.
        like: an array; the result is allocated where it is.

    Raises:
        MemoryError: the host has too little memory for a bitmap of ``numel`` bits or for ``2 * count`` indices.
    """
    chosen = np.empty(count, np.uint32)
    if _random_indices(numel, first, count, seed, parameter, step, chosen):
        raise MemoryError(f"not enough memory to choose {count} of {numel} elements at random")
    return chosen


@indices.cuda
def _(numel: int, count: int, seed: int, parameter: int, step: int, like: Any, first: int = 0) -> Device:
    xp = array_module(like)
    bits, chosen = cleared(xp, -(-numel // 32), u32), xp.empty(count, u32)
    if count:
        key = key_words(seed, parameter, step)
        for_each(xp, "random/random", "random_bits", count, numel, first, count, *key, bits)
        bitmap.find_ones(xp, bits.view(np.uint8), chosen)
    return chosen
