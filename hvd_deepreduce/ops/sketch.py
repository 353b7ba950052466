"""TODO sketch."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from hvd_deepreduce.ops import arrays, bits, delta, huffman, sections, sort
from hvd_deepreduce.ops.deferred import check_later, counter, read_counter
from hvd_deepreduce.ops.device import array_module, f32, grid, i32, key_words, launch, scan_status, u32, u64
from hvd_deepreduce.ops.dispatch import operation
from hvd_deepreduce.ops.library import address, check, kernel
from hvd_deepreduce.ops.types import F32, U8, U32, Device

HEADER = struct.Struct("<BxxxIIIHH")  # joint/minmax_sketch.py: rows, columns in 65536ths, buckets, negative, groups
_sketch_group = kernel("sketch_group", "v", "ppUppuppp")
_sketch_insert = kernel("sketch_insert", "v", "ppUuuuuuup")
_sketch_query = kernel("sketch_query", "I", "pUuuuuuuppp")
_flagged_bound = kernel("flagged_bound", "U", "U")
_flagged_encode = kernel("flagged_encode", "U", "pUp")
_flagged_decode = kernel("flagged_decode", "I", "pUUUp")
_sketch_merge = kernel("sketch_merge", "I", "ppUUpp")
_sketch_bound = kernel("sketch_bound", "U", "sU")
_sketch_encode = kernel("sketch_encode", "U", "ppUuuuip")
_sketch_decode = kernel("sketch_decode", "I", "pUUUuuuipp")


def _first_buckets(header: bytes) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """The first bucket of each group, and the number of buckets."""
    _, _, buckets, negative, below, above = HEADER.unpack(header)
    firsts = [group * negative // below for group in range(below)]
    firsts += [negative + group * (buckets - negative) // above for group in range(above)]
    return np.array([*firsts, buckets], u32)


def _columns(header: bytes, count: int) -> int:
    """The number of bins in a row of the sketch of a group of ``count`` keys."""
    per_key: int = HEADER.unpack(header)[1]
    return min(max(count * per_key // 65536, 1), 2**32 - 1)


@operation()
def split_groups(indices: U32, codes: U32, group_of: U32, first: U32) -> tuple[U32, U32, U8]:
    """How many elements each group has; then keys and numbers (0 for a group's first bucket), group behind group, in
    their old order within each."""
    counts, keys = np.empty(first.size, np.uint32), np.empty(indices.size, np.uint32)
    numbers = np.empty(indices.size, np.uint8)
    _sketch_group(
        address(indices), address(codes), indices.size, address(group_of), address(first), first.size,
        address(counts), address(keys), address(numbers),
    )  # fmt: skip
    return counts, keys, numbers


@split_groups.cuda
def _(indices: Device, codes: Device, group_of: Device, first: Device) -> tuple[Device, Device, Device]:
    xp, n = array_module(indices), indices.size
    counts, keys, numbers = xp.zeros(first.size, u32), xp.empty(n, u32), xp.empty(n, np.uint8)
    words = xp.empty(n, u64)
    if n:
        launch(xp, "sketch/sketch", "group_words", grid(xp, n), codes, u64(n), group_of, words, counts)
        words = sort.radix_sort(xp, words, 32, 41 if first.size > 256 else 40)
        launch(xp, "sketch/sketch", "group_take", grid(xp, n), words, u64(n), indices, codes, first, keys, numbers)
    return counts, keys, numbers


@operation()
def insert(keys: U32, numbers: U8, rows: int, columns: int, width: int, seed: int, parameter: int, step: int) -> U8:
    """The bins, row behind row, of a MinMaxSketch of numbers below ``width``."""
    bins = np.empty(rows * columns, np.uint8)
    _sketch_insert(
        address(keys), address(numbers), keys.size, rows, columns, width, seed, parameter, step, address(bins),
    )  # fmt: skip
    return bins


@insert.cuda
def _(
    keys: Device, numbers: Device, rows: int, columns: int, width: int, seed: int, parameter: int, step: int
) -> Device:
    xp, n = array_module(keys), keys.size
    depths, bins = xp.zeros(rows * columns, u32), xp.empty(rows * columns, np.uint8)
    if n:
        launch(
            xp, "sketch/sketch", "sketch_insert", rows * grid(xp, n), keys, numbers, u64(n), u32(rows), u32(columns),
            u32(width), *key_words(seed, parameter, step), depths,
        )  # fmt: skip
    launch(xp, "sketch/sketch", "sketch_bins", grid(xp, bins.size), depths, u64(bins.size), u32(width), bins)
    return bins


@operation()
def query(keys: U32, bins: U8, means: F32, rows: int, columns: int, seed: int, parameter: int, step: int) -> F32:
    """The means of the numbers that the ``rows * columns`` bins hold for the keys, each what was inserted or less.

    On a GPU: waits for the device.
    """
    values = np.empty(keys.size, np.float32)
    check(
        _sketch_query(
            address(keys), keys.size, rows, columns, means.size, seed, parameter, step, address(bins), address(means),
            address(values),
        )  # fmt: skip
    )
    return values


@query.cuda
def _(
    keys: Device, bins: Device, means: Device, rows: int, columns: int, seed: int, parameter: int, step: int
) -> Device:
    xp, n = array_module(keys), keys.size
    if not 0 < rows <= 8 or columns == 0:
        check(-3)
    values, error = xp.empty(n, f32), xp.zeros(1, i32)
    launch(
        xp, "sketch/sketch", "sketch_query", grid(xp, max(n, rows * columns)), keys, u64(n), u32(rows), u32(columns),
        u32(means.size), *key_words(seed, parameter, step), bins, means, values, error,
    )  # fmt: skip
    check_later(error)
    return values


@operation()
def flagged_encode(keys: U32) -> U8:
    """The section of keys drawn at the end of kernels/sketch/sketch.cpp.

    On a GPU: waits for the device: the size is not known before.
    """
    out = np.empty(_flagged_bound(keys.size), np.uint8)
    return out[: _flagged_encode(address(keys), keys.size, address(out))].copy()


@flagged_encode.cuda
def _(keys: Device) -> Device:
    xp, n = array_module(keys), keys.size
    out, end = xp.empty((n + 3) // 4 + 4 * n, np.uint8), counter(xp)
    if n:
        launch(xp, "sketch/sketch", "flagged_encode", grid(xp, n), keys, u64(n), scan_status(xp, n), end, out)
    return out[: read_counter(end)]


@operation()
def flagged_decode(section: U8, numel: int, count: int) -> U32:
    """The keys of ``flagged_encode``.

    On a GPU: waits for the device.
    """
    if section.size < count:
        check(-1)
    keys = np.empty(count, np.uint32)
    check(_flagged_decode(address(section), section.size, count, numel, address(keys)))
    return keys


@flagged_decode.cuda
def _(section: Device, numel: int, count: int) -> Device:
    xp = array_module(section)
    if section.size < (count + 3) // 4 + count:
        check(-1)
    gaps, keys, error = xp.empty(count, u32), xp.empty(count, u32), xp.zeros(1, i32)
    if count == 0:
        check(-1 if section.size else 0)
        return keys
    launch(
        xp, "sketch/sketch", "flagged_gaps", grid(xp, count), section, u64(section.size), u64(count), scan_status(xp,
        count), counter(xp), gaps, error,
    )  # fmt: skip
    launch(
        xp, "sketch/sketch", "keys_of_gaps", grid(xp, count), gaps, u64(count), u64(numel), scan_status(xp, count),
        counter(xp), keys, error,
    )  # fmt: skip
    check_later(error)
    return keys


@operation()
def merge(keys: U32, values: F32, numel: int) -> tuple[U32, F32]:
    """The pairs sorted by key; the keys must differ and be below ``numel``.

    On a GPU: waits for the device.
    """
    sorted_keys, sorted_values = np.empty_like(keys), np.empty_like(values)
    result = _sketch_merge(
        address(keys), address(values), keys.size, numel, address(sorted_keys), address(sorted_values),
    )  # fmt: skip
    if result == 1:
        raise MemoryError(f"the merge of {keys.size} keys found no memory")
    check(result)
    return sorted_keys, sorted_values


@merge.cuda
def _(keys: Device, values: Device, numel: int) -> tuple[Device, Device]:
    xp, n = array_module(keys), keys.size
    sorted_keys, sorted_values = xp.empty(n, u32), xp.empty(n, f32)
    pairs, error = xp.empty(n, u64), xp.zeros(1, i32)
    if n:
        launch(xp, "sort/sort", "key_pairs", grid(xp, n), keys, values, u64(n), pairs)
        pairs = sort.radix_sort(xp, pairs, 32, 64)
        launch(xp, "sort/sort", "key_unpair", grid(xp, n), pairs, u64(n), u64(numel), sorted_keys, sorted_values, error)
        check_later(error)
    return sorted_keys, sorted_values


@operation(1)
def encode(
    header: bytes, means: F32, indices: U32, codes: U32, coded: bool, seed: int, parameter: int, step: int
) -> U8:
    """The section drawn in joint/minmax_sketch.py, of one element or more; ``coded`` as SKCompress has it.

    On a GPU: waits for the device, for each group.
    """
    tables = len(header) + means.nbytes
    section = np.empty(_sketch_bound(header, indices.size), np.uint8)
    section[: len(header)] = np.frombuffer(header, np.uint8)
    section[len(header) : tables] = means.view(np.uint8)
    size = _sketch_encode(
        address(indices), address(codes), indices.size, seed, parameter, step, coded, address(section),
    )  # fmt: skip
    if size == 0:
        raise MemoryError(f"the sketches of {indices.size} elements found no memory")
    if size == 1:
        raise ValueError(f"a group of {indices.size} elements takes 2^32 bytes or more: use more groups")
    return section[:size].copy()


@encode.cuda
def _(
    header: bytes, means: Device, indices: Device, codes: Device, coded: bool, seed: int, parameter: int, step: int
) -> Device:
    xp, firsts, rows = array_module(indices), _first_buckets(header), header[0]
    widths = np.diff(firsts)
    group_of = np.repeat(np.arange(widths.size, dtype=u32), widths)
    counts, keys, numbers = split_groups(indices, codes, xp.asarray(group_of), xp.asarray(firsts[:-1].copy()))
    sizes, parts, begin = np.zeros((widths.size, 3), u32), [], 0
    for group, count in enumerate(arrays.to_host(counts).tolist()):
        if not count:
            continue
        own, width, end = keys[begin : begin + count], int(widths[group]), begin + count
        bins = insert(own, numbers[begin:end], rows, _columns(header, count), width, seed, parameter, step)
        of_keys = delta.encode(own) if coded else flagged_encode(own)
        of_bins = huffman.encode(bins) if coded else bits.pack(bins, (width - 1).bit_length())
        if max(of_keys.size, of_bins.size) >> 32:
            raise ValueError(f"a group of {count} elements takes 2^32 bytes or more: use more groups")
        sizes[group] = count, of_keys.size, of_bins.size
        parts += [of_keys, of_bins]
        begin = end
    tables = sections.join(header, means, xp.asarray(sizes.reshape(-1)))
    return sections.remember_start(xp.concatenate([tables, *parts]), header)


@operation()
def decode(section: U8, numel: int, count: int, coded: bool, seed: int, parameter: int, step: int) -> tuple[U32, F32]:
    """Sorted keys and their values out of a section with a checked header, whose tables lie within it.

    On a GPU: waits for the device, for each group.
    """
    keys, values = np.empty(count, np.uint32), np.empty(count, np.float32)
    result = _sketch_decode(
        address(section), section.size, count, numel, seed, parameter, step, coded, address(keys), address(values),
    )  # fmt: skip
    if result == 1:
        raise MemoryError(f"the sketches of {count} elements found no memory")
    check(result)
    return keys, values


@decode.cuda
def _(
    section: Device, numel: int, count: int, coded: bool, seed: int, parameter: int, step: int
) -> tuple[Device, Device]:
    xp = array_module(section)
    header = sections.peek(section, HEADER.size)
    rows, _, buckets, negative, below, above = HEADER.unpack(header)
    tables = HEADER.size + 4 * buckets
    at = tables + 12 * (below + above)
    on_host = section[HEADER.size : at].get()
    means, sizes = on_host[: 4 * buckets].view(f32), on_host[4 * buckets :].view(u32).reshape(-1, 3).astype(np.int64)
    magnitudes = np.where(np.arange(buckets) < negative, -means, means)
    falls = magnitudes[1:] < magnitudes[:-1]
    falls[negative - 1 : negative] = False
    if not np.isfinite(means).all() or falls.any() or (magnitudes < 0).any() or (magnitudes[:negative] == 0).any():
        check(-4)
    if sizes[:, 0].sum() != count or at + sizes[:, 1:].sum() != section.size:
        check(-5)
    firsts, on_device = _first_buckets(header).tolist(), xp.asarray(means.copy())
    keys, values = [], []
    for group, (of_group, key_bytes, bin_bytes) in enumerate(sizes.tolist()):
        if of_group == 0:
            check(-5 if key_bytes or bin_bytes else 0)
            continue
        low, high = firsts[group], firsts[group + 1]
        columns, bins_at = _columns(header, of_group), at + key_bytes
        of_keys, of_bins = section[at:bins_at], section[bins_at : bins_at + bin_bytes]
        own = delta.decode(of_keys, numel, of_group) if coded else flagged_decode(of_keys, numel, of_group)
        bins = (
            huffman.decode(of_bins, rows * columns)
            if coded
            else bits.unpack(of_bins, rows * columns, (high - low - 1).bit_length(), np.uint8)
        )
        keys.append(own)
        values.append(query(own, bins, on_device[low:high], rows, columns, seed, parameter, step))
        at = bins_at + bin_bytes
    return merge(xp.concatenate(keys), xp.concatenate(values), numel)
