"""Golomb-Rice code of the gaps between sorted indices; kernels/rice/rice.cpp draws the section."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, c_uint64

import numpy as np

from hvd_deepreduce.ops.deferred import check_later, counter, read_counters
from hvd_deepreduce.ops.device import THREADS, array_module, cleared, grid, i32, launch, scan_status, u32, u64
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import address, check, kernel
from hvd_deepreduce.ops.types import U8, U32, Device

_parameter = kernel("rice_parameter", "u", "pUU*")
_bound = kernel("rice_bound", "U", "UU")
_encode = kernel("rice_encode", "v", "pUup")
_decode = kernel("rice_decode", "I", "pUUuUp")


def _check_length(section: U8 | Device, count: int) -> None:
    if section.size == 0 or section.size * 8 < count:  # an index takes at least one bit
        check(-1)


@operation()
def encode(indices: U32, numel: int) -> U8:
    """The section of at least one index; the indices are strictly increasing and below ``numel``.

    On a GPU, the host waits for the device to learn the size of the section.
    """
    size = c_uint64()
    b = _parameter(address(indices), indices.size, numel, byref(size))
    out = np.empty(size.value, np.uint8)
    out[0] = b
    _encode(address(indices), indices.size, b, address(out) + 1)
    return out


@encode.cuda
def _(indices: Device, numel: int) -> Device:
    return encode_all([(indices, numel)])[0]


def encode_all(lists: Sequence[tuple[Device, int]]) -> list[Device]:
    """On a GPU: ``encode`` of each (indices, numel). The host waits once for all sizes."""
    sections, sizes = [], []
    for indices, numel in lists:
        xp, count = array_module(indices), indices.size
        status = scan_status(xp, count)
        # One array of zeros, for one launch: | sums [32] | status | words of the section, and one more for put_bits |
        scratch, bits = cleared(xp, 32 + status.size + -(-_bound(count, numel) // 8) + 1, u64), counter(xp)
        sums, status, words = scratch[:32], scratch[32 : 32 + status.size], scratch[32 + status.size :].view(u32)
        launch(xp, "rice/rice", "rice_sums", grid(xp, count, THREADS), indices, u64(count), sums)
        launch(
            xp, "rice/rice", "rice_write", grid(xp, count), indices, u64(count), u64(numel), sums, status, words, bits
        )  # fmt: skip
        sections.append(words.view(np.uint8))
        sizes.append(bits)
    bits_of = read_counters(sizes)
    return [section[: (size + 7) // 8] for section, size in zip(sections, bits_of, strict=True)]


@operation()
def encode_many(lists: Sequence[U32], numels: Sequence[int]) -> list[U8]:
    """``encode`` of several lists of indices, each below its number of elements.

    On a GPU, the host waits once for all sizes.
    """
    return [encode.host(indices, numel) for indices, numel in zip(lists, numels, strict=True)]


@encode_many.cuda
def _(lists: Sequence[Device], numels: Sequence[int]) -> list[Device]:
    return encode_all(list(zip(lists, numels, strict=True)))


@operation()
def decode(section: U8, numel: int, count: int) -> U32:
    """The ``count`` indices of a section, at least one, uint32.

    On a GPU, the host waits for the result of the check, unless checks are deferred.

    Raises:
        ValueError: an encoder cannot have written the section for ``count`` indices below ``numel``.
    """
    _check_length(section, count)
    indices = np.empty(count, np.uint32)
    check(_decode(address(section) + 1, section.size - 1, count, int(section[0]), numel, address(indices)))
    return indices


@decode.cuda
def _(section: Device, numel: int, count: int) -> Device:
    xp = array_module(section)
    _check_length(section, count)
    highs, indices = xp.empty(count, u32), xp.empty(count, u32)
    tile = 8 * THREADS
    tiles = -(-section.size // tile) + 1
    # One array of zeros, for one launch: | ones | end | error | status of the highs | status of the join |
    scratch = cleared(xp, 3 + tiles + -(-count // THREADS) + 1, u64)
    ones, end, error = scratch[:1], scratch[1:2], scratch[2:3].view(i32)[:1]
    launch(
        xp, "rice/rice", "rice_highs", grid(xp, section.size, tile), section, u64(section.size), u64(count),
        scratch[3 : 3 + tiles], highs, ones,
    )  # fmt: skip
    launch(
        xp, "rice/rice", "rice_join", grid(xp, count), section, u64(section.size), u64(count), u64(numel), highs,
        ones, scratch[3 + tiles :], end, indices, error,
    )  # fmt: skip
    check_later(error)
    return indices
