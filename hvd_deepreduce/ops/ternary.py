"""TODO ternary."""

from __future__ import annotations

import numpy as np

from hvd_deepreduce.ops.deferred import check_later, counter, decode_values, read_counter
from hvd_deepreduce.ops.device import array_module, f32, grid, i32, launch, scan_status, u32, u64
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import address, check, kernel
from hvd_deepreduce.ops.types import F32, U8, Device

_trits_pack = kernel("trits_pack", "v", "pUp")
_trits_unpack = kernel("trits_unpack", "I", "pUp")
_three_lc_pack = kernel("three_lc_pack", "v", "pUfp")
_three_lc_unpack = kernel("three_lc_unpack", "I", "pUfp")
_zero_runs_encode = kernel("zero_runs_encode", "U", "pUp")
_zero_runs_decode = kernel("zero_runs_decode", "I", "pUUp")


@operation()
def trits_pack(digits: U8) -> U8:
    """Digits 0, 1, 2, five to a byte, as drawn in kernels/three_lc/three_lc.cpp."""
    out = np.empty(-(-digits.size // 5), np.uint8)
    _trits_pack(address(digits), digits.size, address(out))
    return out


@trits_pack.cuda
def _(digits: Device) -> Device:
    xp = array_module(digits)
    out = xp.empty(-(-digits.size // 5), np.uint8)
    if out.size:
        launch(xp, "quantize/quantize", "trits_pack", grid(xp, out.size), digits, u64(digits.size), out)
    return out


@operation()
def trits_unpack(section: U8, count: int) -> U8:
    """The ``count`` digits of ``trits_pack``.

    On a GPU: waits for the device.
    """
    if section.size != -(-count // 5):  # before an array of that size is allocated
        check(-1)
    digits = np.empty(count, np.uint8)
    check(_trits_unpack(address(section), count, address(digits)))
    return digits


@trits_unpack.cuda
def _(section: Device, count: int) -> Device:
    xp = array_module(section)
    if section.size != -(-count // 5):  # before an array of that size is allocated
        check(-1)
    digits, error = xp.empty(count, np.uint8), xp.zeros(1, i32)
    if count:
        launch(xp, "quantize/quantize", "trits_unpack", grid(xp, section.size), section, u64(count), digits, error)
        check_later(error)
    return digits


@operation()
def three_lc_pack(values: F32, m: float) -> U8:
    """``trits_pack`` of round(value / m) + 1."""
    out = np.empty(-(-values.size // 5), np.uint8)
    _three_lc_pack(address(values), values.size, m, address(out))
    return out


@three_lc_pack.cuda
def _(values: Device, m: float) -> Device:
    xp = array_module(values)
    out = xp.empty(-(-values.size // 5), np.uint8)
    if out.size:
        launch(xp, "quantize/quantize", "three_lc_pack", grid(xp, out.size), values, u64(values.size), f32(m), out)
    return out


@operation()
def three_lc_unpack(section: U8, count: int, m: float) -> F32:
    """-m, 0 or m for each digit; ``section`` has ceil(count / 5) bytes.

    On a GPU: waits for the device.
    """
    values = np.empty(count, np.float32)
    check(_three_lc_unpack(address(section), count, m, address(values)))
    return values


@three_lc_unpack.cuda
def _(section: Device, count: int, m: float) -> Device:
    if not 0 <= m <= np.finfo(f32).max:
        check(-3)
    return decode_values("quantize/quantize", "three_lc_unpack", section, count, section, u64(count), f32(m))


@operation()
def zero_runs_encode(packed: U8) -> U8:
    """Packed digits, their runs of zeros in a byte each.

    On a GPU: waits for the device: the size is not known before.
    """
    out = np.empty(packed.size, np.uint8)
    return out[: _zero_runs_encode(address(packed), packed.size, address(out))]


@zero_runs_encode.cuda
def _(packed: Device) -> Device:
    xp, n = array_module(packed), packed.size
    out = xp.empty(n, np.uint8)
    if n == 0:
        return out
    found, size = counter(xp), counter(xp)
    others, rank = xp.empty(n, u32), xp.empty(n, u32)
    launch(
        xp, "quantize/quantize", "zero_runs_find", grid(xp, n), packed, u64(n), scan_status(xp, n), found, others,
        rank,
    )  # fmt: skip
    launch(
        xp, "quantize/quantize", "zero_runs_write", grid(xp, n), packed, u64(n), found, others, rank, scan_status(xp,
        n), size, out,
    )  # fmt: skip
    return out[: read_counter(size)]


@operation()
def zero_runs_decode(section: U8, count: int) -> U8:
    """The ``count`` bytes of ``zero_runs_encode``.

    On a GPU: waits for the device.
    """
    if section.size * 14 < count:  # before an array of that size is allocated
        check(-1)
    out = np.empty(count, np.uint8)
    check(_zero_runs_decode(address(section), section.size, count, address(out)))
    return out


@zero_runs_decode.cuda
def _(section: Device, count: int) -> Device:
    xp, n = array_module(section), section.size
    if n * 14 < count:  # before an array of that size is allocated
        check(-1)
    out, size = xp.empty(count, np.uint8), counter(xp)
    if n:
        launch(
            xp, "quantize/quantize", "zero_runs_decode", grid(xp, n), section, u64(n), u64(count), scan_status(xp, n),
            size, out,
        )  # fmt: skip
    made = read_counter(size)
    if made != count:
        check(-1 if made < count else -3)
    return out
