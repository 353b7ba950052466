"""Increasing keys as gaps of one to four bytes, as SketchML writes them; kernels/sketch/flagged_keys.cpp."""

from __future__ import annotations

import numpy as np

from hvd_deepreduce.ops.deferred import check_later, counter, read_counter
from hvd_deepreduce.ops.device import array_module, cleared, for_each, grid, launch, scan_status
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import check, kernel
from hvd_deepreduce.ops.types import U8, U32, Device, i32, u32

bound = kernel("flagged_bound", "U", "U")
"""The most bytes that so many keys take."""
_encode = kernel("flagged_encode", "U", "pUp")
_decode = kernel("flagged_decode", "I", "pUUUp")


@operation()
def encode(keys: U32) -> U8:
    """Increasing keys as gaps of one to four bytes each; kernels/sketch/flagged_keys.h draws the bytes.

    On a GPU, the host waits for the device to learn the size of the section.
    """
    out = np.empty(bound(keys.size), np.uint8)
    return out[: _encode(keys, keys.size, out)].copy()


@encode.cuda
def _(keys: Device) -> Device:
    xp, n = array_module(keys), keys.size
    out, end = xp.empty(bound(n), np.uint8), counter(xp)
    for_each(xp, "sketch/flagged_keys", "flagged_encode", n, keys, n, scan_status(xp, n), end, out)
    return out[: read_counter(end)]


@operation()
def decode(section: U8, numel: int, count: int) -> U32:
    """The ``count`` keys of ``encode``: uint32, increasing.

    On a GPU, the host waits for the check of the section, unless checks are deferred.

    Raises:
        ValueError: the encoder cannot have written the section for ``count`` keys below ``numel``.
    """
    if section.size < count:
        check(-1)
    keys = np.empty(count, np.uint32)
    check(_decode(section, section.size, count, numel, keys))
    return keys


@decode.cuda
def _(section: Device, numel: int, count: int) -> Device:
    xp = array_module(section)
    if section.size < (count + 3) // 4 + count:
        check(-1)
    gaps, keys, error = xp.empty(count, u32), xp.empty(count, u32), cleared(xp, 1, i32)
    if count == 0:
        check(-1 if section.size else 0)
        return keys
    launch(
        xp, "sketch/flagged_keys", "flagged_gaps", grid(xp, count), section, section.size, count,
        scan_status(xp, count), counter(xp), gaps, error,
    )  # fmt: skip
    launch(
        xp, "sketch/flagged_keys", "keys_of_gaps", grid(xp, count), gaps, count, numel, scan_status(xp, count),
        counter(xp), keys, error,
    )  # fmt: skip
    check_later(error)
    return keys
