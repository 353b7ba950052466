"""TODO sections."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_deepreduce.ops.deferred import check_later, state
from hvd_deepreduce.ops.device import NULL, THREADS, array_module, grid, i32, launch, u32, u64
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import address, check, kernel
from hvd_deepreduce.ops.types import U8, Device

HEADER_BYTES = 64
"""How much of a container, and of each of its sections, ``prefetch_headers`` reads."""
CHECKSUM_AT = 12
"""The offset of the checksum in a container, in bytes."""
_checksum = kernel("checksum", "u", "pU")


def checksum(data: U8) -> int:
    """The checksum of a container (whole 32-bit words), its own place left out."""
    return int(_checksum(address(data), data.size))


def remember_start(section: Device, start: bytes) -> Device:
    """The section; the host knows how it starts."""
    if state.starts is not None and section.size:
        state.starts[section.data.ptr] = section, start
    return section


@operation(slice(1, None))
def join(header: bytes, *arrays: NDArray[Any], pad: int = 1, checked: bool = False) -> U8:
    """Up to 64 bytes and up to four arrays, one behind the other, each filled with zeros to a multiple of ``pad``;
    ``checked``: with the checksum of a container."""
    begin = -(-len(header) // pad) * pad
    out = np.empty(begin + sum([-(-array.nbytes // pad) * pad for array in arrays]), np.uint8)
    bytes_of_out = out.data
    bytes_of_out[:begin] = header.ljust(begin, b"\0")
    for array in arrays:
        size = array.nbytes
        end = begin + size
        if size:
            out[begin:end] = array if array.dtype == np.uint8 else array.view(np.uint8)
        begin += -(-size // pad) * pad
        if end < begin:
            bytes_of_out[end:begin] = bytes(begin - end)
    if checked:
        bytes_of_out[CHECKSUM_AT : CHECKSUM_AT + 4] = checksum(out).to_bytes(4, "little")
    return out


@join.cuda
def _(header: bytes, *arrays: Device, pad: int = 1, checked: bool = False) -> Device:
    xp = array_module(next(array for array in arrays if not isinstance(array, np.ndarray)))
    total = -(-len(header) // pad) * pad
    pieces = []
    for array in arrays:
        if array.nbytes:
            pieces += [array.view(np.uint8), u64(total), u64(array.nbytes)]
            total += -(-array.nbytes // pad) * pad
    pieces += [NULL, u64(0), u64(0)] * (4 - len(pieces) // 3)
    words = -(-total // 8)
    out = (xp.zeros if checked else xp.empty)(words, u64)
    if words:
        start = np.frombuffer(header.ljust(64, b"\0"), u64)
        launch(xp, "container/container", "join", grid(xp, words), *start, *pieces, u64(words), u32(checked), out)
    section = out.view(np.uint8)[:total]
    return section if checked else remember_start(section, header)  # the host has not seen the checksum


@operation()
def peek(section: U8, size: int) -> bytes:
    """The first bytes of a section, for the host.

    On a GPU: waits for the device where they are not known.
    """
    return section[:size].tobytes()


@peek.cuda
def _(section: Device, size: int) -> bytes:
    _, start = (state.starts or {}).get(section.data.ptr, (None, b""))
    if len(start) < min(size, section.size):
        start = section[:size].get().tobytes()
    return start[: min(size, section.size)]


@operation()
def prefetch_headers(data: U8, ranks: int) -> None:
    """Before the heads of the containers in ``data`` are asked for.

    On a GPU: waits for the device.
    """


@prefetch_headers.cuda
def _(data: Device, ranks: int) -> None:
    if state.starts is None or not data.size:
        return
    xp = array_module(data)
    heads = xp.empty(4 * HEADER_BYTES * ranks, np.uint8)
    launch(xp, "container/container", "container_heads", 1, data, u64(data.size), u32(ranks), heads)
    at = 0
    for starts in heads.get().reshape(ranks, 4, HEADER_BYTES):
        # As far as they go: a container that is refused is the last.
        for size, start in zip((HEADER_BYTES, *starts[0, 40:].view(u64).tolist()), starts, strict=True):
            if at + size > data.size:
                return
            remember_start(data[at : at + size], start.tobytes()[:size])
            at += -(-size // 8) * 8


@operation()
def check_container(data: U8) -> None:
    """``ValueError`` where a container's checksum is not the one in its header.

    On a GPU: waits for the device.
    """
    if checksum(data) != int.from_bytes(data.data[CHECKSUM_AT : CHECKSUM_AT + 4], "little"):
        check(-6)


@check_container.cuda
def _(data: Device) -> None:
    xp, words = array_module(data), data.view(u32)
    scratch, error = xp.zeros(2, u32), xp.zeros(1, i32)
    blocks = grid(xp, words.size, 4 * THREADS)
    launch(xp, "container/container", "check_container", blocks, words, u64(words.size), scratch, error)
    check_later(error)
