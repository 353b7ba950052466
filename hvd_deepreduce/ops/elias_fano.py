"""Elias-Fano code of sorted indices; kernels/elias_fano/elias_fano.cpp draws the section."""

from __future__ import annotations

import numpy as np

from hvd_deepreduce.ops import bits
from hvd_deepreduce.ops.deferred import check_later, counter
from hvd_deepreduce.ops.device import THREADS, array_module, cleared, for_each, grid, launch, scan_status
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import check, check_room, kernel
from hvd_deepreduce.ops.types import U8, U32, Device, i32, u32

_low_bits = kernel("elias_fano_low_bits", "u", "UU")
_bytes = kernel("elias_fano_bytes", "U", "UUU")
_encode = kernel("elias_fano_encode", "v", "pUUp")
_decode = kernel("elias_fano_decode", "I", "pUUUp")


@operation()
def encode(indices: U32, numel: int) -> U8:
    """The section of strictly increasing indices below ``numel``, empty for none.

    On a GPU, the host waits for the device to read the last index, which gives the size of the section.
    """
    last = int(indices[-1]) if indices.size else 0
    out = np.empty(_bytes(last, indices.size, numel), np.uint8)
    _encode(indices, indices.size, numel, out)
    return out


@encode.cuda
def _(indices: Device, numel: int) -> Device:
    xp, count = array_module(indices), indices.size
    if count == 0:
        return xp.empty(0, np.uint8)
    size = _bytes(int(indices[count - 1 :].get()[0]), count, numel)
    words = cleared(xp, -(-size // 4), u32)
    low = u32(_low_bits(count, numel))
    for_each(xp, "elias_fano/elias_fano", "elias_fano_write", count, indices, count, low, words)
    return words.view(np.uint8)[:size]


@operation()
def decode(section: U8, numel: int, count: int) -> U32:
    """The ``count`` indices of a section, uint32.

    On a GPU, the host waits for the result of the check, unless checks are deferred.

    Raises:
        ValueError: an encoder cannot have written the section for ``count`` indices below ``numel``.
    """
    check_room(section, count)  # an index takes at least one bit
    indices = np.empty(count, np.uint32)
    check(_decode(section, section.size, count, numel, indices))
    return indices


@decode.cuda
def _(section: Device, numel: int, count: int) -> Device:
    xp = array_module(section)
    check_room(section, count)  # an index takes at least one bit
    indices = xp.empty(count, u32)
    if count == 0:
        check(-3 if section.size else 0)
        return indices
    low = _low_bits(count, numel)
    at = bits.packed_bytes(count, low)
    if section.size < at:
        check(-1)
    highs, ones, error = xp.empty(count, u32), counter(xp), cleared(xp, 1, i32)
    rest, tile = section[at:], 8 * THREADS
    for_each(
        xp, "elias_fano/elias_fano", "elias_fano_highs", rest.size, rest, rest.size, count,
        scan_status(xp, rest.size, tile), highs, ones, tile=tile,
    )  # fmt: skip
    launch(
        xp, "elias_fano/elias_fano", "elias_fano_join", grid(xp, count), section, section.size, at, count, numel,
        u32(low), highs, ones, indices, error,
    )  # fmt: skip
    check_later(error)
    return indices
