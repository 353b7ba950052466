"""Fields of equal width, and checks of index lists; kernels/bits/bits.cpp draws the section."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_deepreduce.ops.deferred import generic_kernel
from hvd_deepreduce.ops.device import allocate, array_module, cleared, grid, launch
from hvd_deepreduce.ops.dispatch import generic, operation
from hvd_deepreduce.ops.library import check, check_size
from hvd_deepreduce.ops.types import U8, U32, Device, i32, u32

_FILE = "bits/bits"
_pack = {w: generic_kernel(_FILE, f"pack{8 * w}", "v", "pUup") for w in (1, 4)}
_unpack = {w: generic_kernel(_FILE, f"unpack{8 * w}", "I", "pUUup") for w in (1, 4)}
_check_indices = generic_kernel(_FILE, "check_indices", "I", "pUU")


def packed_bytes(count: int, width: int) -> int:
    """The size of ``count`` fields of ``width`` bits, in bytes."""
    return (count * width + 7) // 8


@generic
def pack(values: NDArray[Any], width: int) -> U8:
    """The values as fields of ``width`` bits.

    Args:
        values: uint8 or uint32, all below 2^width; this is not checked.
        width: 0 to 8 for uint8, 0 to 32 for uint32.

    Returns:
        ``packed_bytes(values.size, width)`` bytes.
    """
    words = allocate(values, (values.size * width + 31) // 32, np.uint32)
    _pack[values.itemsize](words.size, values, values.size, width, words)
    return words.view(np.uint8)[: packed_bytes(values.size, width)]


@generic
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
    values = allocate(section, count, dtype)
    if width > 8 * values.itemsize:
        check(-1)
    _unpack[values.itemsize](count, section, section.size, count, width, values)
    return values


@generic
def check_indices(indices: U32, numel: int) -> None:
    """Checks that the indices are strictly increasing and below ``numel``.

    On a GPU, the host waits for the result of the check, unless checks are deferred.

    Raises:
        ValueError: they are not.
    """
    _check_indices(indices.size, indices, indices.size, numel)


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
        launch(xp, _FILE, "check_order", grid(xp, order.size), order, order.size, seen, error)
        check(int(error.get()[0]))
