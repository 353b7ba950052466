"""Fields of equal width, and checks of index lists; kernels/bits/bits.cpp draws the section."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_deepreduce.ops.deferred import check_later
from hvd_deepreduce.ops.device import array_module, cleared, grid, i32, launch, u32, u64
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import address, check, check_size, kernel
from hvd_deepreduce.ops.types import U8, U32, Device

_pack = {1: kernel("pack8", "v", "pUup"), 4: kernel("pack32", "v", "pUup")}
_unpack = {1: kernel("unpack8", "I", "pUUup"), 4: kernel("unpack32", "I", "pUUup")}
_check_indices = kernel("check_indices", "I", "pUU")


def packed_bytes(count: int, width: int) -> int:
    """The size of ``count`` fields of ``width`` bits, in bytes."""
    return (count * width + 7) // 8


@operation()
def pack(values: NDArray[Any], width: int) -> U8:
    """The values as fields of ``width`` bits.

    Args:
        values: uint8 or uint32, all below 2^width; this is not checked.
        width: 0 to 8 for uint8, 0 to 32 for uint32.

    Returns:
        ``packed_bytes(values.size, width)`` bytes.
    """
    out = np.empty(packed_bytes(values.size, width), np.uint8)
    _pack[values.itemsize](address(values), values.size, width, address(out))
    return out


@pack.cuda
def _(values: Device, width: int) -> Device:
    xp = array_module(values)
    words = xp.empty((values.size * width + 31) // 32, u32)
    if words.size:
        kernel = f"pack{8 * values.itemsize}"
        launch(xp, "bits/bits", kernel, grid(xp, words.size), values, u64(values.size), u32(width), words)
    return words.view(np.uint8)[: packed_bytes(values.size, width)]


@operation()
def unpack(section: U8, count: int, width: int, dtype: type[np.unsignedinteger[Any]]) -> NDArray[Any]:
    """The ``count`` fields of ``pack``.

    On a GPU, the host waits for the check of the section, unless checks are deferred.

    Args:
        section: ``packed_bytes(count, width)`` bytes.
        count: the number of fields.
        width: bits of a field.
        dtype: uint8 or uint32.

    Raises:
        ValueError: the section has another size, the bits after its last field are not zeros, or a field has more bits
            than the dtype.
    """
    check_size(section, packed_bytes(count, width))  # before an array of that size is allocated
    values = np.empty(count, dtype)
    check(_unpack[values.itemsize](address(section), section.size, count, width, address(values)))
    return values


@unpack.cuda
def _(section: Device, count: int, width: int, dtype: type[np.unsignedinteger[Any]]) -> Device:
    xp = array_module(section)
    check_size(section, packed_bytes(count, width))  # before an array of that size is allocated
    values, error = xp.empty(count, dtype), cleared(xp, 1, i32)
    if width > 8 * values.itemsize:
        check(-1)
    if count:
        kernel = f"unpack{8 * values.itemsize}"
        launch(
            xp, "bits/bits", kernel, grid(xp, count), section, u64(section.size), u64(count), u32(width), values, error
        )
        check_later(error)
    return values


@operation()
def check_indices(indices: U32, numel: int) -> None:
    """Checks that the indices are strictly increasing and below ``numel``.

    On a GPU, the host waits for the result of the check, unless checks are deferred.

    Raises:
        ValueError: they are not.
    """
    check(_check_indices(address(indices), indices.size, numel))


@check_indices.cuda
def _(indices: Device, numel: int) -> None:
    xp = array_module(indices)
    error = cleared(xp, 1, i32)
    if indices.size:
        launch(xp, "bits/bits", "check_indices", grid(xp, indices.size), indices, u64(indices.size), u64(numel), error)
        check_later(error)


@operation()
def check_order(order: U32) -> None:
    """Checks that ``order`` is a permutation of 0 to ``order.size - 1``.

    On a GPU, the host waits for the result even if checks are deferred, since the order is about to be used as indices.

    Raises:
        ValueError: it is not.
    """
    seen = np.zeros(order.size, bool)
    if order.max(initial=0) < order.size:
        seen[order] = True
    if not seen.all():
        check(-8)


@check_order.cuda
def _(order: Device) -> None:
    xp = array_module(order)
    error, seen = cleared(xp, 1, i32), cleared(xp, -(-order.size // 32), u32)
    if order.size:
        launch(xp, "bits/bits", "check_order", grid(xp, order.size), order, u64(order.size), seen, error)
        check(int(error.get()[0]))
