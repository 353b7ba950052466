"""Sections and containers: joining arrays into one, the checksum, and what the host reads of them.

docs/container.md draws the container. On a GPU, the host remembers the first bytes of sections that it has joined or
prefetched within ``deferred.encoding`` and ``deferred.reading``, so that ``peek`` need not wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvd_deepreduce.ops.deferred import check_later, read_counters, state
from hvd_deepreduce.ops.device import THREADS, array_module, cleared, for_each, grid, launch
from hvd_deepreduce.ops.dispatch import on_host, operation
from hvd_deepreduce.ops.library import check, kernel
from hvd_deepreduce.ops.types import U8, U32, Device, i32, u32, u64

_FILE = "sections/sections"

HEADER_BYTES = 64
"""The size of a container's header. ``prefetch_short_headers`` reads so many bytes of each section, too."""
CHECKSUM_AT = 12
"""The offset of the checksum in a container's header, in bytes."""
NUMBER_BYTES = 9
"""The most bytes of a varint: numbers below 2^63."""
_NO_CHECKSUM = 0xFFFFFFFF
_checksum = kernel("checksum", "u", "pUU")


def checksum(data: U8, at: int = CHECKSUM_AT) -> int:
    """The checksum of a container on the host, which is kept in the 4 bytes from ``at`` on."""
    return int(_checksum(data, data.size, at // 4))


def varint(number: int) -> bytes:
    """The number's groups of 7 bits, the lowest first; all bytes but the last have their high bit set."""
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins at byte ``at``, and where it ends.

    Raises:
        ValueError: it does not end within the data or ``NUMBER_BYTES``, or ``varint`` would have written fewer bytes.
    """
    number = 0
    for place, byte in enumerate(data[at : at + NUMBER_BYTES]):
        number |= (byte & 127) << 7 * place
        if byte < 128:
            if not byte and place:
                break
            return number, at + place + 1
    raise ValueError("its header has a number that does not end, or that has more bytes than it needs")


def remember_start(section: Device, start: bytes) -> Device:
    """Returns the section, after noting its first bytes for ``peek``."""
    if state.starts is not None and section.size:
        state.starts[section.data.ptr] = section, start
    return section


def known_start(section: Device) -> bytes:
    """The first bytes of a section on a GPU that the host knows."""
    return (state.starts or {}).get(section.data.ptr, (None, b""))[1]


@operation(slice(1, None))
def join(
    header: bytes, *arrays: NDArray[Any], pad: int = 1, checked: bool = False, at: int = CHECKSUM_AT, salt: int = 0,
    room: int = 0,
) -> U8:  # fmt: skip
    """The bytes of the header and of the arrays in a row, each padded with zeros.

    Args:
        header: at most 64 bytes.
        arrays: at most four, of any dtype.
        pad: the header and each array are padded to a multiple of so many bytes.
        checked: whether to write a container's checksum; the header is then a container's.
        at: where the checksum is kept, in bytes, a multiple of 4; the header is 0 there.
        salt: is added to the checksum.
        room: on the host, bytes in memory before the result, of which nothing is known, for a header.
    """
    begin = -(-len(header) // pad) * pad
    out = np.empty(room + begin + sum([-(-array.nbytes // pad) * pad for array in arrays]), np.uint8)[room:]
    memory = out.data
    memory[:begin] = header.ljust(begin, b"\0")
    for array in arrays:
        size = array.nbytes
        end = begin + size
        if size:
            out[begin:end] = array if array.dtype == np.uint8 else array.view(np.uint8)
        begin += -(-size // pad) * pad
        if end < begin:
            memory[end:begin] = bytes(begin - end)
    if checked:
        memory[at : at + 4] = (checksum(out, at) + salt & 0xFFFFFFFF).to_bytes(4, "little")
    return out


@join.cuda
def _(
    header: bytes, *arrays: Device, pad: int = 1, checked: bool = False, at: int = CHECKSUM_AT, salt: int = 0,
    room: int = 0,
) -> Device:  # fmt: skip
    xp = array_module(next(array for array in arrays if not isinstance(array, np.ndarray)))
    total = -(-len(header) // pad) * pad
    pieces = []
    for array in arrays:
        if array.nbytes:
            pieces += [array.view(np.uint8), total, array.nbytes]
            total += -(-array.nbytes // pad) * pad
    pieces += [None, 0, 0] * (4 - len(pieces) // 3)
    words = -(-total // 8)
    out = (xp.zeros if checked else xp.empty)(words, u64)
    if words:
        start = np.frombuffer(header.ljust(HEADER_BYTES, b"\0"), u64)
        kept = u32(at // 4 if checked else _NO_CHECKSUM)
        for_each(xp, _FILE, "join", words, *start, *pieces, words, kept, u32(salt), out)
    section = out.view(np.uint8)[:total]
    return section if checked else remember_start(section, header)  # the checksum is not in `header`


def measured_container(
    start: bytes, end: bytes, indices: Device, bits: Device, values: Device, salt: Any
) -> Device:
    """On a GPU: a container of version 2 whose index section the host does not know the size of, in room for all sizes.

    Args:
        start: what its header has between the checksum and the index section's bytes; at most 8 bytes.
        end: what it has behind these; at most 8 bytes.
        indices: room of the index section.
        bits: of the index section; uint64 ``[1]``.
        values: the value section.
        salt: as in ``join``.
    """
    xp = array_module(values)
    words = -(-(4 + len(start) + NUMBER_BYTES + len(end) + indices.nbytes + values.nbytes) // 8)
    out, scratch = xp.empty(words, u64), cleared(xp, 2, u32)
    for_each(
        xp, _FILE, "measured_container", words, int.from_bytes(start, "little"), u32(len(start)),
        int.from_bytes(end, "little"), u32(len(end)), indices, bits, values, values.nbytes, salt, scratch, out,
    )  # fmt: skip
    room: Device = out.view(np.uint8)
    return room


@operation()
def peek(section: U8, size: int) -> bytes:
    """The first ``size`` bytes of a section, or all of a shorter one, on the host.

    On a GPU, the host waits for the device unless it remembers the bytes.
    """
    return section[:size].tobytes()


@peek.cuda
def _(section: Device, size: int) -> bytes:
    start = known_start(section)
    if len(start) < min(size, section.size):
        start = section[:size].get().tobytes()
    return start[: min(size, section.size)]


@operation()
def prefetch_short_headers(data: U8, ranks: int, numels: Sequence[int], itemsize: int) -> None:
    """Reads what ``peek`` will return for the containers of ``data``, of version 2, and for their sections, at once.

    On a GPU, within ``deferred.reading``, the host waits for the device. Elsewhere this does nothing.

    Args:
        data: containers in a row, perhaps broken: those of the first rank's tensors, then those of the next rank's, and
            so on.
        ranks: how many are expected.
        numels: elements of each tensor.
        itemsize: bytes of an element.
    """


@prefetch_short_headers.cuda
def _(data: Device, ranks: int, numels: Sequence[int], itemsize: int) -> None:
    if state.starts is None or not data.size:
        return
    xp = array_module(data)
    size, containers = 4 * HEADER_BYTES + 64, ranks * len(numels)
    heads, there = xp.empty(containers * size, np.uint8), xp.asarray(np.array(numels, u64))
    launch(xp, _FILE, "short_heads", 1, data, data.size, u32(containers), there, u32(len(numels)), itemsize, heads)
    host, first = heads.get(), data.data.ptr
    places = host.reshape(containers, size)[:, 4 * HEADER_BYTES :].copy().view(u64).reshape(containers, 4, 2).tolist()
    known = host.tobytes()
    for number, of_one in enumerate(places):
        for part, (begin, end) in enumerate(of_one):
            if end > begin:  # as remember_start, without an array for each section
                at = number * size + part * HEADER_BYTES
                state.starts[first + begin] = data, known[at : at + min(end - begin, HEADER_BYTES)]


@operation()
def check_padding(data: U8, ends: Sequence[int]) -> None:
    """Checks the zeros between the sections of a container or of a stream.

    On a GPU, the host waits for the result of the check, unless checks are deferred.

    Args:
        data: uint8, the whole container or stream; its size is a multiple of 8.
        ends: where sections end, at most four; zeros must follow, up to the next multiple of 8.

    Raises:
        ValueError: a byte there is not zero.
    """
    memory = data.data
    for end in ends:
        if end & 7 and memory[end : (end + 7) & ~7].tobytes().strip(b"\0"):
            check(-9)


@check_padding.cuda
def _(data: Device, ends: Sequence[int]) -> None:
    padded = [end for end in ends if end & 7]
    if padded:
        xp = array_module(data)
        error = cleared(xp, 1, i32)
        launch(xp, _FILE, "check_padding", 1, data, *padded, *[0] * (4 - len(padded)), error)
        check_later(error)


@operation()
def check_container(data: U8, at: int = CHECKSUM_AT, salt: int = 0) -> None:
    """Checks a container's checksum.

    On a GPU, the host waits for the result of the check, unless checks are deferred.

    Args:
        data: the whole container.
        at, salt: as in ``join``.

    Raises:
        ValueError: the checksum in the header is not that of the bytes.
    """
    if checksum(data, at) + salt & 0xFFFFFFFF != int.from_bytes(data.data[at : at + 4], "little"):
        check(-6)


@check_container.cuda
def _(data: Device, at: int = CHECKSUM_AT, salt: int = 0) -> None:
    xp = array_module(data)
    scratch, error = cleared(xp, 2, u32), cleared(xp, 1, i32)
    blocks, kept = grid(xp, -(-data.size // 4), 4 * THREADS), u32(at // 4)
    launch(xp, _FILE, "check_container", blocks, data, data.size, kept, u32(salt), scratch, error)
    check_later(error)


class Parts(NamedTuple):
    """A container of version 2 among others.

    Attributes:
        begin: its first byte.
        ends: where its header and then its sections end.
        salt: as in ``join``.
    """

    begin: int
    ends: tuple[int, ...]
    salt: int


def at_once(data: Any) -> bool:
    """Whether containers are taken apart together: on a GPU, where checks are deferred."""
    return not on_host(data) and state.errors is not None


def take_apart(data: Device, containers: Sequence[Parts]) -> list[list[Device]]:
    """On a GPU: the sections of each container, at multiples of 8 bytes in memory. All checksums are checked, later."""
    xp, rows, words = array_module(data), [], 0
    for _, ends, _ in containers:
        for at, end in pairwise(ends):
            if end > at:
                rows.append((at, end - at, words))
                words += -(-(end - at) // 8)
    wholes = [(begin, ends[-1] - begin, salt) for begin, ends, salt in containers]
    there = xp.asarray(np.array([*wholes, *rows], u64).reshape(-1))
    scratch, out = cleared(xp, len(wholes) + 1, u64), xp.empty(words, u64)
    error = scratch[len(wholes) :].view(i32)[:1]
    each = grid(xp, max(size for _, size, _ in wholes), 8 * THREADS)
    launch(xp, _FILE, "check_containers", each * len(wholes), data, there, each, scratch, error)
    check_later(error)
    if rows:
        each, out_of = grid(xp, max(size for _, size, _ in rows), 8 * THREADS), there[3 * len(wholes) :]
        launch(xp, _FILE, "align_sections", each * len(rows), data, out_of, each, out)
    memory, parts, at_word = out.view(np.uint8), [], 0
    for _, ends, _ in containers:
        of_one = []
        for at, end in pairwise(ends):
            section = memory[8 * at_word : 8 * at_word + end - at]
            of_one.append(remember_start(section, known_start(data[at:end])) if end > at else section)
            at_word += -(-(end - at) // 8)
        parts.append(of_one)
    state.opened = memory
    return parts


def place_of(sections: Sequence[Device]) -> tuple[Device, list[int]] | None:
    """The memory that ``take_apart`` made last, and where these sections begin in it; ``None``: not all are there."""
    memory = state.opened
    if memory is None:
        return None
    places = [section.data.ptr - memory.data.ptr for section in sections]
    if all(0 <= at and at + one.size <= memory.size for at, one in zip(places, sections, strict=True)):
        return memory, places
    return None


def encode_many(
    lists: Sequence[Device], numels: Sequence[int], measured: Callable[[Device, int], tuple[Device, Device]]
) -> list[Device]:
    """On a GPU: the sections of several lists of indices, with one wait for all.

    Args:
        measured: of a list and its number of elements: room with its section at the begin, and the number of its bits.
    """
    made = [measured(indices, numel) for indices, numel in zip(lists, numels, strict=True)]
    bits = read_counters([of_one for _, of_one in made])
    return [room[: (size + 7) // 8] for (room, _), size in zip(made, bits, strict=True)]


class Job(NamedTuple):
    """A section among others on a GPU.

    Attributes:
        at, size: its bytes of the data.
        numel: of the tensor, for a section of indices; else 0.
        entries: the number of its symbols or indices, at least 1.
    """

    at: int
    size: int
    numel: int
    entries: int


def decode_many(
    parts: Sequence[U8], numel: int, counts: Sequence[int], one: Callable[[U8, int, int], U32],
    together: Callable[[Device, Sequence[Job]], list[Device]],
) -> list[U32]:  # fmt: skip
    """The indices of several sections: by ``together``, on a GPU, if they were taken apart together; else ``one`` by
    one."""
    found = place_of(parts) if all(counts) else None
    if found is None:
        return [one(section, numel, count) for section, count in zip(parts, counts, strict=True)]
    data, places = found
    return together(data, [Job(at, part.size, numel, n) for at, part, n in zip(places, parts, counts, strict=True)])


def cut(together: Device, jobs: Sequence[Job]) -> list[Device]:
    """The entries of each job, which are one behind the other."""
    ends = np.cumsum([job.entries for job in jobs]).tolist()
    return [together[end - job.entries : end] for end, job in zip(ends, jobs, strict=True)]
