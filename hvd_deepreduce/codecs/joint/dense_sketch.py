"""Grouped MinMaxSketches of all elements of a dense tensor, without keys: the second form of joint/minmax_sketch.py.

Jiang, Fu, Yang, Shao, Cui, "SKCompress: compressing sparse and nonuniform gradient in distributed machine learning",
VLDB Journal 2020, section 7.7, removes the keys of dense gradients. A section with keys tells the group of an element
by the group in which its key stands. Here, in place of the keys, each element has the number of its group::

    | Header, form 1 | means float32 [buckets] | sizes u32 [groups, 3]: elements, 0, bytes of bins |
    | groups of the elements | bins of group 0 | bins of group 1 | ...

The numbers of the groups are fields of ceil(log2 groups) bits. If they are coded and there are 2 to 256 groups, they
are a Huffman section.
"""

from __future__ import annotations

import numpy as np

from hvd_deepreduce.ops import arrays, bits, huffman, sections, sketch
from hvd_deepreduce.ops.library import check
from hvd_deepreduce.ops.sketch import HEADER, Header
from hvd_deepreduce.ops.types import F32, U8, U32

FORM = 1
"""The header's ``form``."""
WRONG_SIZES = -5
"""The number in ops/library.py of sizes that do not add up."""


def _as_symbols(groups: int, coded: bool) -> bool:
    return coded and 2 <= groups <= 256


def encode(header: Header, means: F32, codes: U32, coded: bool, key: tuple[int, int, int]) -> U8:
    """The section of a dense tensor.

    Args:
        header: of the sketches; its form is set here.
        means: float32 ``[header.buckets]``.
        codes: uint32 ``[numel]``, each element's bucket.
        coded: Huffman code the bins and the groups.
        key: seed, parameter and step of the sketches' hashes.
    """
    header = header._replace(form=FORM)
    first = header.first_buckets()
    widths = np.diff(first)
    group_of = arrays.move_like(np.repeat(np.arange(widths.size, dtype=np.uint32), widths), codes)
    groups = arrays.gather(group_of, codes)
    if _as_symbols(widths.size, coded):
        parts = [huffman.encode(bits.pack(groups, 8))]
    else:
        parts = [bits.pack(groups, (widths.size - 1).bit_length())]
    elements = arrays.arange(codes.size, codes)
    counts, keys, numbers = sketch.split_groups(
        elements, codes, group_of, arrays.move_like(first[:-1].copy(), codes)
    )
    sizes, begin = np.zeros((widths.size, 3), np.uint32), 0
    for group, count in enumerate(arrays.to_host(counts).tolist()):
        if not count:
            continue
        end, width = begin + count, int(widths[group])
        columns = sketch.columns_of(header, count)
        bins = sketch.insert(keys[begin:end], numbers[begin:end], header.rows, columns, width, *key)
        part = sketch.encode_bins(bins, width, coded)
        if part.size >> 32:
            raise ValueError(f"a group of {count} elements takes 2^32 bytes or more: use more groups")
        sizes[group] = count, 0, part.size
        parts.append(part)
        begin = end
    tables = arrays.move_like(sizes.reshape(-1), codes)
    return sections.join(header.pack(), means, tables, arrays.concatenate(parts))


def decode(section: U8, numel: int, coded: bool, key: tuple[int, int, int]) -> F32:
    """The ``numel`` values of ``encode``: float32.

    Args:
        section: its header must be valid, and its means and sizes complete; joint/minmax_sketch.py checks that.
        numel: at least one.

    Raises:
        ValueError: the encoder cannot have written the section.
    """
    header = Header.of(section)
    first, sizes_at = header.first_buckets().tolist(), HEADER.size + 4 * header.buckets
    start = arrays.to_host(section[: header.parts_at])
    sizes = np.frombuffer(start[sizes_at:].tobytes(), np.uint32).reshape(-1, 3).astype(np.int64)
    of_bins = int(sizes[:, 2].sum())
    members_end = section.size - of_bins
    if sizes[:, 1].any() or members_end < header.parts_at:
        check(WRONG_SIZES)
    sketch.check_tables(start, header.parts_at + of_bins, numel)
    members = section[header.parts_at : members_end]
    width = 8 if _as_symbols(header.groups, coded) else (header.groups - 1).bit_length()
    if _as_symbols(header.groups, coded):
        members = huffman.decode(members, numel)
    groups = bits.unpack(members, numel, width, np.uint32)
    # Numbers of no group become one more group, which must be empty.
    known = np.minimum(np.arange(2**width, dtype=np.uint32), np.uint32(header.groups))
    first_of = np.arange(header.groups + 1, dtype=np.uint32)
    counts, keys, _ = sketch.split_groups(
        arrays.arange(numel, groups), groups, arrays.move_like(known, groups), arrays.move_like(first_of, groups)
    )
    if arrays.to_host(counts).tolist() != [*sizes[:, 0].tolist(), 0]:
        check(WRONG_SIZES)
    means = arrays.aligned(section[HEADER.size : sizes_at]).view(np.float32)
    values, begin, at = [], 0, members_end
    for group, (count, _, size) in enumerate(sizes.tolist()):
        if not count:
            continue
        of_group, of_buckets = keys[begin : begin + count], means[first[group] : first[group + 1]]
        values.append(sketch.query_group(of_group, section[at : at + size], of_buckets, header, coded, key))
        begin, at = begin + count, at + size
    return arrays.scatter(arrays.concatenate(values), keys)
