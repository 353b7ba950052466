"""Floats without loss, their exponents in codes of few bits (codecs/value/lossless.py); kernels/lossless/lossless.cpp
draws the section. On the host, whole containers of all elements, in one call each: kernels/lossless/containers.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

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

_container_bound = kernel("lossless_container_bound", "U", "U")
_container = kernel("lossless_container", "U", "pUup")
_sum = kernel("lossless_sum", "U", "ppUUuup")
_container_bytes = kernel("lossless_container_bytes", "U", "pUUu")
_scaled = kernel("lossless_scaled", "I", "pUUfp")

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


_HALVES = {None: 0, "float16": 1, "bfloat16": 2}


def containers(values: F32, bounds: Sequence[int], salts: Sequence[int]) -> tuple[U8, list[int]] | None:
    """The containers of version 2 of the slices of a vector, on the host: one behind the other, and the bytes of each.

    Args:
        values: float32 ``[n]``, contiguous.
        bounds: where slices begin, and the last one ends; an empty slice has no container.
        salts: of the slices' checksums.

    Returns:
        ``None``: values are not finite, or a slice takes more bytes so than as it is.
    """
    out, at, sizes = np.empty(_container_bound(values.size) + 16 * len(salts), np.uint8), 0, []
    for (begin, end), salt in zip(pairwise(bounds), salts, strict=True):
        size = _container(values[begin:end], end - begin, salt, out[at:]) if begin < end else 0
        if begin < end and not size:
            return None
        at += size
        sizes.append(size)
    return out[:at], sizes


def container_of_sum(data: U8, sizes: Sequence[int], count: int, half: str | None, salt: int) -> U8 | None:
    """The container of the sum of such containers, in their order, on the host.

    Args:
        data: uint8, contiguous; of any bytes.
        sizes: the bytes of each container; together those of ``data``.
        count: the elements of each, at least 1.
        half: the dtype to which the sum is rounded, ``"float16"`` or ``"bfloat16"``; ``None``: it is not.
        salt: of all checksums.

    Returns:
        ``None``: there are other containers or broken ones; or the sum is not finite, is beyond the range of ``half``,
        or takes more bytes so than as it is.
    """
    out = np.empty(_container_bound(count), np.uint8)
    size = _sum(data, np.array(sizes, np.uint64), len(sizes), count, _HALVES[half], salt, out)
    return out[:size] if size else None


def container_bytes(data: U8, count: int, salt: int) -> int:
    """The bytes of the container at the begin of ``data``, on the host, whose checksum is right; 0: there is none of
    ``count`` values of this codec."""
    size: int = _container_bytes(data, data.size, count, salt)
    return size


def scaled(container: U8, scale: float, out: F32) -> bool:
    """``out = scale * values`` of a container that ``container_bytes`` has found. Returns whether an encoder can have
    written it; if not, a part of ``out`` was overwritten."""
    return not _scaled(container, container.size, out.size, scale, out)
