"""Interleaved rANS, for symbols and for the gaps of indices; kernels/rans/rans.cpp draws the sections."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, c_uint64

import numpy as np

from hvd_deepreduce.ops import entropy, sections
from hvd_deepreduce.ops.deferred import check_later, counter, read_counter
from hvd_deepreduce.ops.device import THREADS, allocate, array_module, cleared, for_each, grid, launch, scan_status
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import check, kernel
from hvd_deepreduce.ops.sections import Job, cut
from hvd_deepreduce.ops.types import U8, U32, Device, i32, u32, u64

_bound = kernel("rans_bound", "U", "U")
_lows_bound = kernel("rans_lows_bound", "U", "U")
_decode = kernel("rans_decode", "I", "pUUp")
_encode = kernel("rans_encode", "U", "pUp")
_indices_encode = kernel("rans_indices_encode", "U", "pUpp*")
_indices_decode = kernel("rans_indices_decode", "I", "pUUUpp")

_FILE = "rans/rans"
_PART_SYMBOLS = 2**15


def _parts(count: int) -> int:
    """Parts of a section, as ``rans_parts`` in kernels/rans/rans.h."""
    return max(1, count // _PART_SYMBOLS)


class _Decoding:
    """The symbols of sections of many containers, all decoded by one launch.

    Attributes:
        table: a row of each section, as kernels/rans/rans.cu draws it.
        each: the most parts of a section.
        scratch: zeros before the launch; its first word has the error.
    """

    def __init__(self, data: Device, jobs: Sequence[Job]) -> None:
        self.data, self.xp, self.jobs = data, array_module(data), jobs
        rows, words, self.count = [], 1, 0
        for job in jobs:
            rows.append((job.at, job.size, job.entries, job.numel, self.count, words, words + 2))
            words += 2 + 2 * (-(-job.entries // THREADS) + 1)
            self.count += job.entries
        self.table, self.scratch = self.xp.asarray(np.array(rows, u64).reshape(-1)), cleared(self.xp, words, u64)
        self.error, self.symbols = self.scratch[:1].view(i32)[:1], self.xp.empty(self.count, np.uint8)
        each = max(_parts(job.entries) for job in jobs)
        launch(
            self.xp, _FILE, "rans_decode", each * len(jobs), data, self.table, each, self.symbols, self.scratch,
            self.error,
        )  # fmt: skip

    def indices(self) -> Device:
        """Those of all sections in a row."""
        indices = self.xp.empty(self.count, u32)
        each = grid(self.xp, max(job.entries for job in self.jobs))
        launch(
            self.xp, _FILE, "rans_indices", each * len(self.jobs), self.data, self.table, each, self.symbols,
            self.scratch, indices, self.error,
        )  # fmt: skip
        return indices


@operation()
def encode(symbols: U8) -> U8:
    """The section of the symbols, empty for none.

    On a GPU, the host waits for the device to learn the size of the section.
    """
    out = np.empty(_bound(symbols.size), np.uint8)
    return out[_encode(symbols, symbols.size, out) :].copy()


@encode.cuda
def _(symbols: Device) -> Device:
    xp, n = array_module(symbols), symbols.size
    if n == 0:
        return xp.empty(0, np.uint8)
    room, out, end = xp.empty(_bound(n), np.uint8), xp.empty(_bound(n), np.uint8), counter(xp)
    parts = _parts(n)
    launch(
        xp, _FILE, "rans_encode", parts, symbols, n, entropy.histogram(xp, symbols), room, scan_status(xp, parts, 1),
        out, end,
    )  # fmt: skip
    return out[: read_counter(end)]


@operation()
def decode(section: U8, count: int) -> U8:
    """The ``count`` symbols of a section, uint8.

    On a GPU, the host waits for the result of the check, unless checks are deferred.

    Raises:
        ValueError: an encoder cannot have written the section for ``count`` symbols.
    """
    symbols = np.empty(count, np.uint8)
    check(_decode(section, section.size, count, symbols))
    return symbols


@decode.cuda
def _(section: Device, count: int) -> Device:
    xp = array_module(section)
    if count == 0:
        check(-3 if section.size else 0)
        return xp.empty(0, np.uint8)
    decoding = _Decoding(section, [Job(0, section.size, 0, count)])
    launch(xp, _FILE, "rans_ends", 1, decoding.table, 1, decoding.scratch, decoding.error)
    check_later(decoding.error)
    return decoding.symbols


@operation()
def encode_indices(indices: U32) -> U8:
    """The section of strictly increasing indices, empty for none.

    On a GPU, the host waits for the device to learn the size of the section.
    """
    scratch, end = np.empty(indices.size, np.uint8), c_uint64()
    out = np.empty(_bound(indices.size) + _lows_bound(indices.size), np.uint8)
    begin = _indices_encode(indices, indices.size, scratch, out, byref(end))
    return out[begin : end.value].copy()


@encode_indices.cuda
def _(indices: Device) -> Device:
    xp, n = array_module(indices), indices.size
    if n == 0:
        return xp.empty(0, np.uint8)
    tokens, lows, end = xp.empty(n, np.uint8), cleared(xp, _lows_bound(n) // 4, u32), counter(xp)
    for_each(xp, _FILE, "rans_tokens", n, indices, n, scan_status(xp, n), end, tokens, lows)
    section = encode(tokens)
    return sections.join(b"", section, lows.view(np.uint8)[: (read_counter(end) + 7) // 8])


@operation()
def decode_indices(section: U8, numel: int, count: int) -> U32:
    """The ``count`` indices of a section, uint32.

    On a GPU, the host waits for the result of the check, unless checks are deferred.

    Raises:
        ValueError: an encoder cannot have written the section for ``count`` indices below ``numel``.
    """
    scratch, indices = np.empty(count, np.uint8), np.empty(count, np.uint32)
    check(_indices_decode(section, section.size, count, numel, scratch, indices))
    return indices


@decode_indices.cuda
def _(section: Device, numel: int, count: int) -> Device:
    if count == 0:
        check(-3 if section.size else 0)
        return allocate(section, 0, u32)
    return _decode_at_once(section, [Job(0, section.size, numel, count)])[0]


def _decode_at_once(data: Device, jobs: Sequence[Job]) -> list[Device]:
    decoding = _Decoding(data, jobs)
    indices = decoding.indices()
    check_later(decoding.error)
    return cut(indices, jobs)


def decode_many(parts: Sequence[U8], numel: int, counts: Sequence[int]) -> list[U32]:
    """``decode_indices`` of several sections; on a GPU in one set of launches, if they were taken apart together."""
    return sections.decode_many(parts, numel, counts, decode_indices, _decode_at_once)
