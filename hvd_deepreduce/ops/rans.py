"""Interleaved rANS, for symbols and for the gaps of indices; kernels/rans/rans.cpp draws the sections."""

from __future__ import annotations

from ctypes import byref, c_uint64
from typing import Any

import numpy as np

from hvd_deepreduce.ops import entropy
from hvd_deepreduce.ops.deferred import check_later, counter, read_counter
from hvd_deepreduce.ops.device import array_module, grid, i32, launch, scan_status, u32, u64
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import address, check, kernel
from hvd_deepreduce.ops.types import U8, U32, Device

_bound = kernel("rans_bound", "U", "U")
_shares_bytes = kernel("rans_shares_bytes", "U", "")
_lows_bound = kernel("rans_lows_bound", "U", "U")
_decode = kernel("rans_decode", "I", "pUUp")
_encode = kernel("rans_encode", "U", "pUp")
_indices_encode = kernel("rans_indices_encode", "U", "pUpp*")
_indices_decode = kernel("rans_indices_decode", "I", "pUUUpp")

_FILE = "rans/rans"


def _decode_symbols(xp: Any, section: Device, count: int) -> tuple[Device, Device, Device]:
    """The symbols, the number of bytes that they took, and the error flag; all on the device."""
    symbols, used, error = xp.empty(count, np.uint8), counter(xp), xp.zeros(1, i32)
    launch(xp, _FILE, "rans_decode", 1, section, u64(section.size), u64(count), symbols, used, error)
    return symbols, used, error


@operation()
def encode(symbols: U8) -> U8:
    """The section of the symbols, empty for none.

    On a GPU, the host waits for the device to learn the size of the section.
    """
    out = np.empty(_bound(symbols.size), np.uint8)
    return out[_encode(address(symbols), symbols.size, address(out)) :].copy()


@encode.cuda
def _(symbols: Device) -> Device:
    xp, n = array_module(symbols), symbols.size
    if n == 0:
        return xp.empty(0, np.uint8)
    out, begin, shares = xp.empty(_bound(n), np.uint8), counter(xp), xp.zeros(_shares_bytes() // 4, u32)
    launch(
        xp, _FILE, "rans_encode", 1, symbols, u64(n), entropy.histogram(xp, symbols), shares, out, u64(out.size), begin
    )
    return out[read_counter(begin) :]


@operation()
def decode(section: U8, count: int) -> U8:
    """The ``count`` symbols of a section, uint8.

    On a GPU, the host waits for the device.

    Raises:
        ValueError: an encoder cannot have written the section for ``count`` symbols.
    """
    symbols = np.empty(count, np.uint8)
    check(_decode(address(section), section.size, count, address(symbols)))
    return symbols


@decode.cuda
def _(section: Device, count: int) -> Device:
    xp = array_module(section)
    if count == 0:
        check(-3 if section.size else 0)
        return xp.empty(0, np.uint8)
    symbols, used, error = _decode_symbols(xp, section, count)
    if read_counter(error) == 0 and read_counter(used) != section.size:
        check(-3)
    check_later(error)
    return symbols


@operation()
def encode_indices(indices: U32) -> U8:
    """The section of strictly increasing indices, empty for none.

    On a GPU, the host waits for the device to learn the size of the section.
    """
    scratch, end = np.empty(indices.size, np.uint8), c_uint64()
    out = np.empty(_bound(indices.size) + _lows_bound(indices.size), np.uint8)
    begin = _indices_encode(address(indices), indices.size, address(scratch), address(out), byref(end))
    return out[begin : end.value].copy()


@encode_indices.cuda
def _(indices: Device) -> Device:
    xp, n = array_module(indices), indices.size
    if n == 0:
        return xp.empty(0, np.uint8)
    tokens, lows, end = xp.empty(n, np.uint8), xp.zeros(_lows_bound(n) // 4, u32), counter(xp)
    launch(xp, _FILE, "rans_tokens", grid(xp, n), indices, u64(n), scan_status(xp, n), end, tokens, lows)
    section = encode(tokens)
    return xp.concatenate([section, lows.view(np.uint8)[: (read_counter(end) + 7) // 8]])


@operation()
def decode_indices(section: U8, numel: int, count: int) -> U32:
    """The ``count`` indices of a section, uint32.

    On a GPU, the host waits for the result of the check, unless checks are deferred.

    Raises:
        ValueError: an encoder cannot have written the section for ``count`` indices below ``numel``.
    """
    scratch, indices = np.empty(count, np.uint8), np.empty(count, np.uint32)
    check(_indices_decode(address(section), section.size, count, numel, address(scratch), address(indices)))
    return indices


@decode_indices.cuda
def _(section: Device, numel: int, count: int) -> Device:
    xp = array_module(section)
    gaps, indices, end = xp.empty(count, u32), xp.empty(count, u32), counter(xp)
    if count == 0:
        check(-3 if section.size else 0)
        return indices
    tokens, used, unread = _decode_symbols(xp, section, count)
    error = xp.zeros(1, i32)
    launch(
        xp, _FILE, "rans_gaps", grid(xp, count), section, u64(section.size), u64(count), tokens, used, unread,
        scan_status(xp, count), end, gaps, error,
    )  # fmt: skip
    check_later(unread)
    check_later(error)
    launch(
        xp, _FILE, "keys_of_gaps", grid(xp, count), gaps, u64(count), u64(numel), scan_status(xp, count), end, indices,
        error,
    )  # fmt: skip
    check_later(error)
    return indices
