"""Floats without loss, their exponents in codes of few bits (codecs/value/lossless.py); kernels/lossless/lossless.cpp
draws the section."""

from __future__ import annotations

import numpy as np

from hvd_deepreduce.ops import sections
from hvd_deepreduce.ops.deferred import check_later, counter, read_counter
from hvd_deepreduce.ops.device import array_module, cleared, grid, launch, scan_status
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import check, check_room, kernel
from hvd_deepreduce.ops.types import F32, U8, Device, i32

_bound = kernel("lossless_bound", "U", "U")
_encode = kernel("lossless_encode", "U", "pUp")
_decode = kernel("lossless_decode", "I", "pUUp")

_FILE = "lossless/lossless"
_CHUNK, _HEAD = 4096, 4
"""As in kernels/lossless/lossless.h, and the bytes that a chunk has at least: its size and its head."""


def _chunks(count: int) -> int:
    return -(-count // _CHUNK)


@operation()
def encode(values: F32) -> U8:
    """The section of form 1 of finite values.

    On a GPU, the host waits for the device to learn the size of the section.

    Args:
        values: float32 ``[n]``.
    """
    out = np.empty(_bound(values.size), np.uint8)
    return out[: _encode(values, values.size, out)]


@encode.cuda
def _(values: Device) -> Device:
    xp, n = array_module(values), values.size
    out, end, chunks = xp.empty(_bound(n), np.uint8), counter(xp), _chunks(n)
    launch(xp, _FILE, "lossless_encode", grid(xp, chunks, 1), values, n, scan_status(xp, chunks, 1), out, end)
    return sections.remember_start(out[: read_counter(end)], b"\1")


@operation()
def decode(section: U8, count: int) -> F32:
    """The ``count`` float32 values of a section of form 1.

    On a GPU, the host waits for the result of the check, unless checks are deferred.

    Raises:
        ValueError: an encoder cannot have written the section for ``count`` values.
    """
    check_room(section, 8 * (1 + _HEAD * _chunks(count)) + count)
    values = np.empty(count, np.float32)
    check(_decode(section, section.size, count, values))
    return values


@decode.cuda
def _(section: Device, count: int) -> Device:
    check_room(section, 8 * (1 + _HEAD * _chunks(count)) + count)
    xp, chunks = array_module(section), _chunks(count)
    values, error = xp.empty(count, np.float32), cleared(xp, 1, i32)
    launch(
        xp, _FILE, "lossless_decode", grid(xp, chunks, 1), section, section.size, count, scan_status(xp, chunks, 1),
        values, error,
    )  # fmt: skip
    check_later(error)
    return values
