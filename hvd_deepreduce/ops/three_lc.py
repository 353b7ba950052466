"""3LC: values rounded to -m, 0, m as packed ternary digits, and runs of zeros in one byte each (joint/three_lc.py).

kernels/ternary/trits.h draws the packed digits, kernels/three_lc/three_lc.h the runs.
"""

from __future__ import annotations

import numpy as np

from hvd_deepreduce.ops.deferred import counter, generic_kernel, read_counter
from hvd_deepreduce.ops.device import allocate, array_module, for_each, scan_status
from hvd_deepreduce.ops.dispatch import generic, operation
from hvd_deepreduce.ops.library import check, check_size, kernel
from hvd_deepreduce.ops.ternary import packed_size
from hvd_deepreduce.ops.types import F32, U8, Device, u32

_FILE = "three_lc/three_lc"
_three_lc_pack = generic_kernel(_FILE, "three_lc_pack", "v", "pUfp")
_three_lc_unpack = generic_kernel(_FILE, "three_lc_unpack", "I", "pUfp")
_longest_run = kernel("zero_runs_longest", "u", "")()
_zero_runs_encode = kernel("zero_runs_encode", "U", "pUp")
_zero_runs_decode = kernel("zero_runs_decode", "I", "pUUp")


@generic
def pack(values: F32, m: float) -> U8:
    """The packed digits round(value / m) + 1: float32 ``[n]`` to uint8 ``[ceil(n / 5)]``.

    Args:
        values: float32, with magnitudes up to ``m``.
        m: a float32, not negative.
    """
    packed = allocate(values, packed_size(values.size), np.uint8)
    _three_lc_pack(packed.size, values, values.size, m, packed)
    return packed


@generic
def unpack(packed: U8, count: int, m: float) -> F32:
    """The ``count`` float32 values of ``pack``: -m, 0 or m.

    On a GPU, the host waits for the check of the bytes, unless checks are deferred.

    Raises:
        ValueError: ``packed`` does not have ceil(count / 5) bytes, ``pack`` cannot have written them, or ``m`` is
            negative or not finite.
    """
    check_size(packed, packed_size(count))
    if not 0 <= m <= np.finfo(np.float32).max:
        check(-3)
    values = allocate(packed, count, np.float32)
    _three_lc_unpack(packed.size, packed, count, m, values)
    return values


@operation()
def zero_runs_encode(packed: U8) -> U8:
    """Packed digits, with each run of 2 to 14 bytes of zeros in one byte.

    On a GPU, the host waits for the device to learn the size of the section.
    """
    out = np.empty(packed.size, np.uint8)
    return out[: _zero_runs_encode(packed, packed.size, out)]


@zero_runs_encode.cuda
def _(packed: Device) -> Device:
    xp, n = array_module(packed), packed.size
    out = xp.empty(n, np.uint8)
    if n == 0:
        return out
    others_count, size = counter(xp), counter(xp)
    others, rank = xp.empty(n, u32), xp.empty(n, u32)
    for_each(xp, _FILE, "zero_runs_find", n, packed, n, scan_status(xp, n), others_count, others, rank)
    for_each(xp, _FILE, "zero_runs_write", n, packed, n, others_count, others, rank, scan_status(xp, n), size, out)
    return out[: read_counter(size)]


@operation()
def zero_runs_decode(section: U8, count: int) -> U8:
    """The ``count`` bytes of packed digits that ``zero_runs_encode`` was given.

    On a GPU, the host waits for the device to learn how many bytes the section encodes.

    Raises:
        ValueError: the section does not encode ``count`` bytes.
    """
    _check_room(section, count)
    packed = np.empty(count, np.uint8)
    check(_zero_runs_decode(section, section.size, count, packed))
    return packed


@zero_runs_decode.cuda
def _(section: Device, count: int) -> Device:
    xp, n = array_module(section), section.size
    _check_room(section, count)
    packed, size = xp.empty(count, np.uint8), counter(xp)
    for_each(xp, _FILE, "zero_runs_decode", n, section, n, count, scan_status(xp, n), size, packed)
    decoded = read_counter(size)
    if decoded != count:
        check(-1 if decoded < count else -3)
    return packed


def _check_room(section: U8, count: int) -> None:
    """Raises ``ValueError`` if even the longest runs are fewer than ``count`` bytes, before these are allocated."""
    if _longest_run * section.size < count:
        check(-1)
