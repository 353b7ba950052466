"""MinMaxSketches of quantile buckets, and their sections (codecs/joint/minmax_sketch.py).

The buckets of each sign are cut into groups, and the elements of a group go into one sketch: a key's bin holds the
number of its bucket within the group. kernels/sketch/sketch.h draws a sketch. The section::

    | Header | means float32 [buckets] | sizes u32 [groups, 3]: elements, bytes of keys, bytes of bins |
    | keys of group 0 | bins of group 0 | keys of group 1 | ...
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvd_deepreduce.ops import arrays, bits, delta, flagged_keys, huffman, sections, sort
from hvd_deepreduce.ops.deferred import generic_kernel
from hvd_deepreduce.ops.device import (
    SCAN_TILE,
    THREADS,
    allocate,
    array_module,
    cleared,
    for_each,
    grid,
    key_words,
    launch,
)
from hvd_deepreduce.ops.dispatch import generic, operation
from hvd_deepreduce.ops.library import check, kernel
from hvd_deepreduce.ops.types import F32, U8, U32, Device, f32, u32, u64

MAX_ROWS = 8
"""The most rows of a sketch, as in kernels/sketch/sketch.h."""
MAX_LENGTHS = 200
"""More bytes than a table of Huffman lengths takes."""
HEADER = struct.Struct("<BBxxIIIHH")
_FILE = "sketch/sketch"
GROUP = np.dtype([(name, "u8") for name in "first count bins columns width of_keys of_bins group".split()])
"""A group with elements, as in kernels/sketch/sketch.cu."""
_sketch_group = kernel("sketch_group", "v", "ppUppuppp")
_sketch_insert = kernel("sketch_insert", "v", "ppUuuuuuup")
_sketch_query = generic_kernel(_FILE, "sketch_query", "I", "pUuuuuuuppp")
_sketch_first_buckets = kernel("sketch_first_buckets", "v", "sp")
_sketch_columns = kernel("sketch_columns", "u", "sU")
_sketch_only_bin = kernel("sketch_only_bin", "I", "pUui")
_sketch_check_tables = kernel("sketch_check_tables", "I", "pUU")
_sketch_bound = kernel("sketch_bound", "U", "sU")
_sketch_encode = kernel("sketch_encode", "U", "ppUuuuip")
_sketch_decode = kernel("sketch_decode", "I", "pUUUuuuipp")


class Header(NamedTuple):
    """The start of a section, 20 bytes: ``| rows u8 | form u8 | 2 zero bytes | columns u32 | buckets u32 |
    negative u32 | groups_below u16 | groups_above u16 |``. kernels/sketch/sketch.cpp has the same struct, and what
    follows from it.

    Attributes:
        rows: of each sketch.
        columns: of a row, in 1/65536 of the group's elements.
        buckets: of both signs.
        negative: buckets of negative values, which come first.
        groups_below: groups of negative buckets.
        groups_above: groups of the other buckets.
        form: 0: with keys; 1: all elements of a dense tensor, without keys (codecs/joint/minmax_sketch.py).
    """

    rows: int
    columns: int
    buckets: int
    negative: int
    groups_below: int
    groups_above: int
    form: int = 0

    @classmethod
    def of(cls, section: U8) -> Header:
        """The header of a section of ``HEADER.size`` bytes or more.

        On a GPU, the host waits for the device unless it remembers the section's first bytes.
        """
        rows, form, columns, buckets, negative, below, above = HEADER.unpack(sections.peek(section, HEADER.size))
        return cls(rows, columns, buckets, negative, below, above, form)

    def pack(self) -> bytes:
        """The 20 bytes."""
        return HEADER.pack(self.rows, self.form, *self[1:-1])

    @property
    def groups(self) -> int:
        """The number of groups of both signs."""
        return self.groups_below + self.groups_above

    @property
    def parts_at(self) -> int:
        """The place of the first group's keys, after the means and the sizes."""
        return HEADER.size + 4 * self.buckets + 12 * self.groups

    def first_buckets(self) -> U32:
        """The first bucket of each group, and the number of buckets: uint32 ``[groups + 1]``."""
        first = np.empty(self.groups + 1, np.uint32)
        _sketch_first_buckets(self.pack(), first)
        return first


@operation()
def split_groups(indices: U32, codes: U32, group_of: U32, first: U32) -> tuple[U32, U32, U8]:
    """Orders elements by group, and keeps their order within a group.

    Args:
        indices: uint32 ``[n]``.
        codes: uint32 ``[n]``, the elements' buckets.
        group_of: uint32, the group of each bucket.
        first: uint32, the first bucket of each group, up to 257 groups.

    Returns:
        counts: uint32, the number of elements of each group.
        keys: uint32 ``[n]``, the indices, ordered by group.
        numbers: uint8 ``[n]``, the elements' buckets, counted from the first of their group.
    """
    counts, keys = np.empty(first.size, np.uint32), np.empty(indices.size, np.uint32)
    numbers = np.empty(indices.size, np.uint8)
    _sketch_group(indices, codes, indices.size, group_of, first, first.size, counts, keys, numbers)
    return counts, keys, numbers


@split_groups.cuda
def _(indices: Device, codes: Device, group_of: Device, first: Device) -> tuple[Device, Device, Device]:
    xp, n = array_module(indices), indices.size
    counts, keys, numbers = cleared(xp, first.size, u32), xp.empty(n, u32), xp.empty(n, np.uint8)
    words = xp.empty(n, u64)
    if n:
        for_each(xp, _FILE, "group_words", n, codes, n, group_of, words, counts)
        words = sort.radix_sort(xp, words, 32, 41 if first.size > 256 else 40)
        for_each(xp, _FILE, "group_take", n, words, n, indices, codes, first, keys, numbers)
    return counts, keys, numbers


@operation()
def insert(keys: U32, numbers: U8, rows: int, columns: int, width: int, seed: int, parameter: int, step: int) -> U8:
    """The bins of a MinMaxSketch: uint8 ``[rows * columns]``, row by row.

    Args:
        keys: uint32 ``[n]``.
        numbers: uint8 ``[n]``, below ``width``.
        rows: 1 to 8.
        width: 1 to 256.
        seed, parameter, step: the key of the hashes.
    """
    bins = np.empty(rows * columns, np.uint8)
    _sketch_insert(keys, numbers, keys.size, rows, columns, width, seed, parameter, step, bins)
    return bins


@insert.cuda
def _(
    keys: Device, numbers: Device, rows: int, columns: int, width: int, seed: int, parameter: int, step: int
) -> Device:
    xp, n = array_module(keys), keys.size
    depths, bins = cleared(xp, rows * columns, u32), xp.empty(rows * columns, np.uint8)
    if n:
        launch(
            xp, _FILE, "sketch_insert", rows * grid(xp, n), keys, numbers, n, u32(rows), u32(columns), u32(width),
            *key_words(seed, parameter, step), depths,
        )  # fmt: skip
    for_each(xp, _FILE, "sketch_bins", bins.size, depths, bins.size, u32(width), bins)
    return bins


@generic
def query(keys: U32, bins: U8, means: F32, rows: int, columns: int, seed: int, parameter: int, step: int) -> F32:
    """The mean of each key's number: float32 ``[n]``. A number is the inserted one or a smaller one.

    On a GPU, the host waits for the check of the bins, unless checks are deferred.

    Args:
        keys: uint32 ``[n]``.
        bins: uint8 ``[rows * columns]``, from ``insert``.
        means: float32, one for each number.

    Raises:
        ValueError: a bin is not below ``means.size``, ``rows`` is not 1 to 8, or ``columns`` is 0.
    """
    n = keys.size
    if not 0 < rows <= MAX_ROWS or columns == 0:
        check(-3)
    values = allocate(keys, n, np.float32)
    _sketch_query(
        max(n, rows * columns), keys, n, rows, columns, means.size, seed, parameter, step, bins, means, values
    )
    return values


@operation(1)
def encode(
    header: Header, means: F32, indices: U32, codes: U32, coded: bool, seed: int, parameter: int, step: int
) -> U8:
    """The section of grouped sketches.

    On a GPU, the host waits for the device twice: for the groups' numbers of elements, and for their bytes.

    Args:
        header: the sketches' sizes, and the numbers of buckets and groups.
        means: float32 ``[header.buckets]``.
        indices: uint32 ``[n]``, increasing, at least one.
        codes: uint32 ``[n]``, each element's bucket.
        coded: write keys as ``delta`` and bins as ``huffman`` sections (SKCompress); else as ``flagged_keys.encode``
            and
            ``bits.pack`` do (SketchML).
        seed, parameter, step: the key of the sketches' hashes.

    Raises:
        MemoryError: the host has too little memory for the sketches.
        ValueError: a group takes 2^32 bytes or more.
    """
    start = header.pack()
    section = np.empty(_sketch_bound(start, indices.size), np.uint8)
    section[: HEADER.size] = np.frombuffer(start, np.uint8)
    section[HEADER.size : HEADER.size + means.nbytes] = means.view(np.uint8)
    size = _sketch_encode(indices, codes, indices.size, seed, parameter, step, coded, section)
    if size == 0:
        raise MemoryError(f"not enough memory for the sketches of {indices.size} elements")
    if size == 1:
        raise ValueError(f"a group of up to {indices.size} elements takes 2^32 bytes or more: use more groups")
    return section[:size].copy()


@encode.cuda
def _(
    header: Header, means: Device, indices: Device, codes: Device, coded: bool, seed: int, parameter: int, step: int
) -> Device:
    xp, start, first = array_module(indices), header.pack(), header.first_buckets()
    widths = np.diff(first)
    group_of = np.repeat(np.arange(widths.size, dtype=u32), widths)
    counts, keys, numbers = split_groups(indices, codes, xp.asarray(group_of), xp.asarray(first[:-1].copy()))
    table, out_words, bins_size = _table_of_groups(header, arrays.to_host(counts), widths, coded)
    groups, rows = u32(table.shape[0]), u32(header.rows)
    most = int(max(table["count"].max(), header.rows * table["columns"].max()))
    there, tiles = xp.asarray(table.view(u64).reshape(-1)), -(-most // SCAN_TILE) + 1
    each = max(1, grid(xp, indices.size) // table.shape[0])  # blocks of a group
    of_groups = table.shape[0] * each
    depths, bins, sizes = cleared(xp, bins_size, u32), xp.empty(bins_size, np.uint8), xp.empty(2 * table.shape[0], u64)
    out = cleared(xp, out_words, u32)
    occurs = cleared(xp, table.shape[0] * 4 * THREADS, u64) if coded else None
    launch(
        xp, _FILE, "groups_insert", of_groups, keys, numbers, there, groups, rows, *key_words(seed, parameter, step),
        depths,
    )  # fmt: skip
    launch(xp, _FILE, "groups_bins", of_groups, depths, there, groups, rows, bins, occurs)
    if coded:
        lengths, plans = cleared(xp, 33 * table.shape[0], u64), (delta.PLAN_WORDS, huffman.PLAN_WORDS)
        of_keys, of_bins = (xp.empty(words * table.shape[0], u64) for words in plans)
        status, ends = cleared(xp, 3 * tiles * table.shape[0], u64), xp.empty(3 * table.shape[0], u64)
        launch(xp, _FILE, "groups_count", of_groups, keys, there, groups, lengths)
        launch(
            xp, _FILE, "groups_plan", 2 * table.shape[0], there, groups, rows, lengths, occurs, of_keys, of_bins, sizes
        )
        launch(
            xp, _FILE, "groups_write_coded", 3 * of_groups, keys, bins, there, groups, rows, of_keys, of_bins, tiles,
            status, ends, out,
        )  # fmt: skip
    else:
        status = cleared(xp, tiles * table.shape[0], u64)
        launch(
            xp, _FILE, "groups_write_plain", 2 * of_groups, keys, bins, there, groups, rows, tiles, status, sizes, out
        )
    found = sizes.get().reshape(-1, 2).astype(np.int64)
    if (found >> 32).any():
        raise ValueError(f"a group of up to {indices.size} elements takes 2^32 bytes or more: use more groups")
    of_all = np.zeros((widths.size, 3), u32)
    of_all[table["group"]] = np.column_stack([table["count"], found])
    written = out.view(np.uint8)
    places = 4 * np.column_stack([table["of_keys"], table["of_bins"]]).astype(np.int64)
    parts = [written[at : at + size] for at, size in zip(places.flat, found.flat, strict=True)]
    tables = sections.join(start, means, xp.asarray(of_all.reshape(-1)))
    return sections.remember_start(xp.concatenate([tables, *parts]), start)


def _table_of_groups(header: Header, counts: U32, widths: U32, coded: bool) -> tuple[NDArray[Any], int, int]:
    """The table of kernels/sketch/sketch.cu, of the groups that have elements: ``GROUP``; the words of their sections,
    each with room for the most that it can take; and the number of their bins."""
    rows: list[tuple[int, ...]] = []
    first = words = bins = 0
    for group, (count, width) in enumerate(zip(counts.tolist(), widths.tolist(), strict=True)):
        if not count:
            continue
        columns = columns_of(header, count)
        size = header.rows * columns
        room = delta.bound(count) if coded else flagged_keys.bound(count)
        of_bins = huffman.bound(size) if coded else bits.packed_bytes(size, (width - 1).bit_length())
        rows.append((first, count, bins, columns, width, words, words + -(-room // 4), group))
        first, bins, words = first + count, bins + size, words + -(-room // 4) + -(-of_bins // 4)
    return np.array(rows, GROUP), words, bins


def encode_bins(bins: U8, width: int, coded: bool) -> U8:
    """The bins of a sketch of ``width`` numbers, as ``encode`` writes them."""
    return huffman.encode(bins) if coded else bits.pack(bins, (width - 1).bit_length())


def query_group(keys: U32, section: U8, means: F32, header: Header, coded: bool, key: tuple[int, int, int]) -> F32:
    """The values of a group's keys, from its bins as ``encode_bins`` wrote them and the means of its buckets.

    Raises:
        ValueError: the encoder cannot have written the bins.
    """
    width, rows, columns = means.size, header.rows, columns_of(header, keys.size)
    if rows * columns > 8 * section.size:  # fewer than a bit for each: all bins are equal, so they are one bin
        only = np.full(1, _only_bin(section, width, coded), np.uint8)
        bins, rows, columns = arrays.move_like(only, keys), 1, 1
    elif coded:
        bins = huffman.decode(section, rows * columns)
    else:
        bins = bits.unpack(section, rows * columns, (width - 1).bit_length(), np.uint8)
    return query(keys, bins, means, rows, columns, *key)


def columns_of(header: Header, count: int) -> int:
    """The bins in a row of the sketch of a group of ``count`` keys."""
    columns: int = _sketch_columns(header.pack(), count)
    return columns


def check_tables(start: U8, size: int, count: int) -> None:
    """Checks the means and the groups' sizes of a section, whose header is valid.

    Args:
        start: the section's first ``Header.parts_at`` bytes, on the host.
        size: the bytes of all tables, keys and bins.
        count: elements of all groups.

    Raises:
        MemoryError: the host has too little memory for the tables.
        ValueError: the encoder cannot have written them.
    """
    wrong = _sketch_check_tables(start, size, count)
    if wrong == 1:
        raise MemoryError(f"not enough memory for the sketches of {count} elements")
    check(wrong)


def _only_bin(section: U8, width: int, coded: bool) -> int:
    """The number that all bins of a group have; the section is too short to hold others.

    Raises:
        ValueError: it holds no such number.
    """
    start = arrays.to_host(section[:MAX_LENGTHS])
    only: int = _sketch_only_bin(start, start.size, width, coded) if section.size <= MAX_LENGTHS else -1
    check(only)
    return only


@operation()
def decode(section: U8, numel: int, count: int, coded: bool, seed: int, parameter: int, step: int) -> tuple[U32, F32]:
    """The ``count`` keys, uint32 and increasing, and their values, float32, of ``encode``.

    On a GPU, the host waits for the device at least once for each group.

    Args:
        section: its header must be valid, and its means and sizes complete; codecs/joint/minmax_sketch.py checks that.
        numel: the keys must be below it.
        count: at least one.
        coded, seed, parameter, step: as in ``encode``.

    Raises:
        MemoryError: the host has too little memory for the sketches.
        ValueError: the encoder cannot have written the section.
    """
    keys, values = np.empty(count, np.uint32), np.empty(count, np.float32)
    result = _sketch_decode(section, section.size, count, numel, seed, parameter, step, coded, keys, values)
    if result == 1:
        raise MemoryError(f"not enough memory for the sketches of {count} elements")
    check(result)
    return keys, values


@decode.cuda
def _(
    section: Device, numel: int, count: int, coded: bool, seed: int, parameter: int, step: int
) -> tuple[Device, Device]:
    xp = array_module(section)
    header = Header.of(section)
    start = section[: header.parts_at].get()
    check_tables(start, section.size, count)
    sizes_at = HEADER.size + 4 * header.buckets
    sizes = start[sizes_at:].view(u32).reshape(-1, 3)
    first, means = header.first_buckets().tolist(), xp.asarray(start[HEADER.size : sizes_at].view(f32))
    at = header.parts_at
    keys, values = [], []
    for group, (elements, key_size, bin_size) in enumerate(sizes.tolist()):
        if not elements:
            continue
        key_bytes, bin_bytes = section[at : at + key_size], section[at + key_size : at + key_size + bin_size]
        of_group = (delta.decode if coded else flagged_keys.decode)(key_bytes, numel, elements)
        of_buckets = means[first[group] : first[group + 1]]
        keys.append(of_group)
        values.append(query_group(of_group, bin_bytes, of_buckets, header, coded, (seed, parameter, step)))
        at += key_size + bin_size
    return sort.by_key(xp.concatenate(keys), xp.concatenate(values), numel)
