"""Bitmaps: one bit for each element; kernels/bitmap/bitmap.cpp draws the section."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvd_deepreduce.ops.deferred import check_later, counter
from hvd_deepreduce.ops.device import THREADS, array_module, cleared, for_each, grid, launch, scan_status
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import check, check_size, kernel
from hvd_deepreduce.ops.types import U8, U32, Device, i32, u32

_FILE = "bitmap/bitmap"

_encode = kernel("bitmap_encode", "v", "pUp")
_decode = kernel("bitmap_decode", "I", "pUUUp")


def find_ones(xp: Any, bits: Device, places: Device) -> Device:
    """Writes the places of the first ``places.size`` ones of a bit string on a GPU, in order.

    Args:
        xp: the array module.
        bits: the string, uint8.
        places: uint32, overwritten.

    Returns:
        The number of all ones of the string, uint64 ``[1]`` on the device.
    """
    ones = counter(xp)
    if bits.size:
        tile = 8 * THREADS
        for_each(
            xp, _FILE, "find_ones", bits.size, bits, bits.size, scan_status(xp, bits.size, tile), places, places.size,
            ones, tile=tile,
        )  # fmt: skip
    return ones


@operation()
def encode(indices: U32, numel: int) -> U8:
    """The bitmap of ``numel`` bits in which the bits at ``indices``, all below ``numel``, are 1."""
    out = np.zeros((numel + 7) // 8, np.uint8)
    _encode(indices, indices.size, out)
    return out


@encode.cuda
def _(indices: Device, numel: int) -> Device:
    xp = array_module(indices)
    words = cleared(xp, -(-numel // 32), u32)
    for_each(xp, _FILE, "bitmap_encode", indices.size, indices, indices.size, words)
    return words.view(np.uint8)[: (numel + 7) // 8]


@operation()
def decode(section: U8, numel: int, count: int) -> U32:
    """The indices of the ``count`` ones of a bitmap of ``numel`` bits, uint32 ``[count]``.

    On a GPU, the host waits for the result of the check, unless checks are deferred.

    Raises:
        ValueError: the section has another size, another number of ones, or a one after bit ``numel - 1``.
    """
    check_size(section, (numel + 7) // 8)
    indices = np.empty(count, np.uint32)
    check(_decode(section, section.size, numel, count, indices))
    return indices


@decode.cuda
def _(section: Device, numel: int, count: int) -> Device:
    xp = array_module(section)
    check_size(section, (numel + 7) // 8)
    indices, error = xp.empty(count, u32), cleared(xp, 1, i32)
    ones = find_ones(xp, section, indices)
    padding = section.size - numel // 8
    launch(xp, _FILE, "check_bitmap", grid(xp, max(1, padding)), section, section.size, numel, count, ones, error)
    check_later(error)
    return indices
