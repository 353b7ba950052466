"""A 64-bit hash of arrays: finds faults in messages, and ranks whose results differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_deepreduce.ops.device import THREADS, array_module, cleared, grid, launch
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import kernel
from hvd_deepreduce.ops.types import Device, Floats, Parts, u32, u64

_hash64 = kernel("hash64", "U", "pUU")
_hash64_of_sums = kernel("hash64_of_sums", "U", "pUU")
_LANES = 8
"""As in kernels/hash/lanes.h."""


def hash64(data: NDArray[Any], seed: int = 0) -> int:
    """The hash of a contiguous array's bytes, 0 to 2^64 - 1. On the host.

    It finds every change of a single bit, and any other change with a probability of about 1 - 2^-64. It depends on the
    position of each word and on the number of bytes.

    Args:
        seed: another seed gives another hash; the hash of one array as the seed of the next one joins them.
    """
    return int(_hash64(data, data.nbytes, seed))


@operation()
def hash_parts(dense: Floats, parts: Parts) -> list[int]:
    """``hash64`` of parts of an array, float32 or float64. On a GPU, the host waits for the device.

    Args:
        parts: (begin, end) of each, in elements.
    """
    return [hash64(dense[begin:end]) for begin, end in parts]


@hash_parts.cuda
def _(dense: Device, parts: Parts) -> list[int]:
    if not parts:
        return []
    xp, size = array_module(dense), dense.itemsize
    rows: Sequence[tuple[int, int]] = [(begin * size // 4, (end - begin) * size) for begin, end in parts]
    there, sums = xp.asarray(np.array(rows, u64).reshape(-1)), cleared(xp, _LANES * len(rows), u64)
    each = grid(xp, max(1, max(size for _, size in rows) // 8), 4 * THREADS)
    launch(xp, "hash/hash", "hash_parts", each * len(rows), dense.view(u32), there, each, sums)
    found = sums.get().reshape(-1, _LANES)
    return [int(_hash64_of_sums(row, size, 0)) for row, (_, size) in zip(found, rows, strict=True)]
