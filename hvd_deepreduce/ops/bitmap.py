"""TODO bitmap."""

from __future__ import annotations

import numpy as np

from hvd_deepreduce.ops import bits
from hvd_deepreduce.ops.deferred import check_later
from hvd_deepreduce.ops.device import array_module, grid, i32, launch, u32, u64
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import address, check, check_size, kernel
from hvd_deepreduce.ops.types import U8, U32, Device

_bitmap_encode = kernel("bitmap_encode", "v", "pUp")
_bitmap_decode = kernel("bitmap_decode", "I", "pUUUp")


@operation()
def encode(indices: U32, numel: int) -> U8:
    """``numel`` bits, set at the indices."""
    out = np.zeros((numel + 7) // 8, np.uint8)
    _bitmap_encode(address(indices), indices.size, address(out))
    return out


@encode.cuda
def _(indices: Device, numel: int) -> Device:
    xp = array_module(indices)
    words = xp.zeros(-(-numel // 32), u32)
    if indices.size:
        launch(xp, "bits/bits", "bitmap_encode", grid(xp, indices.size), indices, u64(indices.size), words)
    return words.view(np.uint8)[: (numel + 7) // 8]


@operation()
def decode(section: U8, numel: int, count: int) -> U32:
    """The indices of ``bitmap_encode``.

    On a GPU: waits for the device.
    """
    check_size(section, (numel + 7) // 8)
    indices = np.empty(count, np.uint32)
    check(_bitmap_decode(address(section), section.size, numel, count, address(indices)))
    return indices


@decode.cuda
def _(section: Device, numel: int, count: int) -> Device:
    xp = array_module(section)
    check_size(section, (numel + 7) // 8)
    indices, error = xp.empty(count, u32), xp.zeros(1, i32)
    found = bits.find_ones(xp, section, indices)
    spare = section.size - numel // 8
    launch(
        xp, "bits/bits", "check_bitmap", grid(xp, max(1, spare)), section, u64(section.size), u64(numel), u64(count),
        found, error,
    )  # fmt: skip
    check_later(error)
    return indices
