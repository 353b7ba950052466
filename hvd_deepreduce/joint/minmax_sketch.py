"""What SketchML and SKCompress share: quantile buckets, and their numbers in grouped MinMaxSketches.

Jiang, Fu, Yang, Cui, "SketchML: accelerating distributed machine learning with data sketches", SIGMOD 2018; as told in
Jiang, Fu, Yang, Shao, Cui, "SKCompress: compressing sparse and nonuniform gradient in distributed machine learning",
VLDB Journal 2020, section 4 and appendix A.2.
"""

from __future__ import annotations

import struct
from abc import ABC
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from hvd_deepreduce.backend import cpu
from hvd_deepreduce.codec import U8, U32, Floats, JointCodec, Key
from hvd_deepreduce.value.quantile import to_float32

HEADER = struct.Struct("<BxxxIIIHH")
MAX_ROWS, MAX_COLUMNS, MAX_WIDTH, MAX_GROUPS, MAX_BUCKETS = 8, 4, 256, 256, 65536
ONE_COLUMN = 65536
"""The header counts columns in this part of a kept element, so that both sides have the same number."""


class Coders(NamedTuple):
    """How a group's keys and bins become bytes; the decoders raise ``ValueError`` for bytes that are not an encoder's.

    Attributes:
        encode_keys: (keys, numel) to bytes. decode_keys: (bytes, numel, count) to keys.
        encode_bins: (bins, width) to bytes, bins below the width. decode_bins: (bytes, count, width) to bins.
    """

    encode_keys: Callable[[U32, int], U8]
    decode_keys: Callable[[U8, int, int], U32]
    encode_bins: Callable[[U8, int], U8]
    decode_bins: Callable[[U8, int, int], U8]


class MinMaxSketch(JointCodec, ABC):
    """The settings, the encoder and the decoder of both codecs, but for the ``coders`` of keys and bins.

    Section, empty where nothing is kept:

        | rows u8 | 3 zero bytes | columns u32, in 1/65536 of a group's count | buckets u32 | negative buckets u32 |
        | groups of negative buckets u16 | of others u16 | means float32 [buckets] |
        | a group's count, its bytes of keys, its bytes of bins: u32 [groups, 3] |
        | keys of group 0 | bins of group 0 | keys of group 1 | ...

    The buckets stand as in kernels/cpu/quantile.cpp: negative ones first, and each sign's from small to large
    magnitude. Group j of the g of a sign holds its buckets from floor(j * b / g) on, b being how many the sign has.
    """

    buckets: int = Field(256, ge=2, le=MAX_BUCKETS)
    groups: int = Field(8, ge=1, le=MAX_GROUPS)
    rows: int = Field(2, ge=1, le=MAX_ROWS)
    columns: float = Field(0.2, ge=0.001, le=MAX_COLUMNS, allow_inf_nan=False)
    center: Literal["mean", "middle"] = "mean"
    coders: ClassVar[Coders]

    @model_validator(mode="after")
    def _narrow(self) -> MinMaxSketch:
        if self.buckets > MAX_WIDTH * self.groups:
            raise ValueError(
                f"{self.buckets} buckets in {self.groups} groups are more than {MAX_WIDTH} a group: use more groups"
            )
        return self

    def encode(self, indices: U32 | None, values: Floats, numel: int, key: Key) -> tuple[U8, U32 | None]:
        if values.size == 0:
            return np.empty(0, np.uint8), indices
        every = np.arange(numel, dtype=np.uint32) if indices is None else indices
        means, codes, negative = cpu.quantile_encode(to_float32(values), self.buckets, self.center == "middle")
        columns = round(self.columns * ONE_COLUMN)
        groups = [groups_of(side, means.size, self.groups) for side in (negative, means.size - negative)]
        first, ends = bounds(negative, means.size, *groups)
        group_of = np.repeat(np.arange(first.size, dtype=np.uint32), ends - first)
        counts, keys, numbers = cpu.sketch_group(every, codes, group_of, first)
        sizes, parts = [], []
        stop = 0
        for count, of_group in zip(counts.tolist(), (ends - first).tolist(), strict=True):
            begin, stop = stop, stop + count
            ours = keys[begin:stop]
            key_part = bin_part = np.empty(0, np.uint8)
            if count:
                sketch = cpu.sketch_insert(
                    ours, numbers[begin:stop], self.rows, columns_of(count, columns), of_group, *key[:3]
                )
                key_part, bin_part = self.coders.encode_keys(ours, numel), self.coders.encode_bins(sketch, of_group)
            sizes.append((count, key_part.size, bin_part.size))
            parts += [key_part, bin_part]
        if max(map(max, sizes)) >= 2**32:
            raise ValueError(f"a group of {max(sizes)[0]} elements takes 2^32 bytes or more: use more groups")
        header = HEADER.pack(self.rows, columns, means.size, negative, *groups)
        table = np.array(sizes, np.uint32).reshape(-1).view(np.uint8)
        return np.concatenate([np.frombuffer(header, np.uint8), means.view(np.uint8), table, *parts]), indices


def groups_of(side: int, buckets: int, groups: int) -> int:
    """How many groups the ``side`` buckets of one sign get, out of ``groups`` for ``buckets``: its share, rounded; one
    at least, and none wider than ``MAX_WIDTH``."""
    share = (2 * min(groups, buckets) * side + buckets) // (2 * buckets)
    return max(share, -(-side // MAX_WIDTH))


def bounds(negative: int, buckets: int, groups_below: int, groups_above: int) -> tuple[U32, U32]:
    """The first bucket of each group, and the one behind its last."""
    below = np.arange(groups_below, dtype=np.int64) * negative // max(groups_below, 1)
    above = negative + np.arange(groups_above, dtype=np.int64) * (buckets - negative) // max(groups_above, 1)
    first = np.concatenate([below, above]).astype(np.uint32)
    return first, np.append(first[1:], np.uint32(buckets))


def columns_of(count: int, columns: int) -> int:
    """Bins in a row of the sketch of ``count`` keys."""
    return min(max(1, count * columns // ONE_COLUMN), 2**32 - 1)


def decode(section: U8, numel: int, count: int, dense: bool, key: Key, coders: Coders) -> tuple[U32 | None, Floats]:
    """The support and the values of ``MinMaxSketch.encode``.

    Raises:
        ValueError: for a section that no encoder wrote.
    """
    if dense and count != numel:
        raise ValueError(f"all {numel} elements are wanted, and {count} are there")
    if count == 0 and section.size == 0:
        return None if dense else np.empty(0, np.uint32), np.empty(0, np.float32)
    if section.size < HEADER.size:
        raise ValueError(f"a sketch's section begins with {HEADER.size} bytes, and this one has {section.size}")
    rows, columns, buckets, negative, groups_below, groups_above = HEADER.unpack_from(section.data)
    if not 1 <= rows <= MAX_ROWS or not 1 <= columns <= MAX_COLUMNS * ONE_COLUMN:
        raise ValueError(f"no sketch has {rows} rows and columns {columns}")
    if not negative <= buckets or not 1 <= buckets <= min(count, MAX_BUCKETS):
        raise ValueError(f"{count} values do not lie in {buckets} buckets, {negative} of them negative")
    for side, groups in ((negative, groups_below), (buckets - negative, groups_above)):
        if not -(-side // MAX_WIDTH) <= groups <= min(side, MAX_GROUPS):
            raise ValueError(f"{side} buckets of one sign do not make {groups} groups")
    sizes_at = HEADER.size + 4 * buckets
    at = sizes_at + 12 * (groups_below + groups_above)
    if section.size < at:
        raise ValueError(f"the tables of {buckets} buckets do not fit into {section.size} bytes")
    means = section[HEADER.size : sizes_at].view(np.float32)
    check_means(means, negative)
    first, ends = bounds(negative, buckets, groups_below, groups_above)
    sizes = section[sizes_at:at].view(np.uint32).reshape(-1, 3).tolist()
    if sum(size[0] for size in sizes) != count or sum(size[1] + size[2] for size in sizes) != section.size - at:
        raise ValueError(f"the groups' sizes do not add up to {count} elements and {section.size} bytes")
    keys, values = np.empty(count, np.uint32), np.empty(count, np.float32)
    stop = 0
    for (of_group, key_bytes, bin_bytes), low, high in zip(sizes, first.tolist(), ends.tolist(), strict=True):
        begin, stop = stop, stop + of_group
        bins_at, end = at + key_bytes, at + key_bytes + bin_bytes
        if of_group:
            keys[begin:stop] = ours = coders.decode_keys(section[at:bins_at].copy(), numel, of_group)
            wide = columns_of(of_group, columns)
            bins = coders.decode_bins(section[bins_at:end].copy(), rows * wide, high - low)
            values[begin:stop] = cpu.sketch_query(ours, bins, means[low:high], rows, wide, *key[:3])
        elif at != end:
            raise ValueError(f"a group of no element has {end - at} bytes")
        at = end
    support, values = cpu.sketch_merge(keys, values, numel)
    return None if dense else support, values


def check_means(means: np.ndarray[Any, np.dtype[np.float32]], negative: int) -> None:
    """``ValueError`` where the means are not those of buckets in their order."""
    below, above = means[:negative], means[negative:]
    if not (np.isfinite(means).all() and (below < 0).all() and (above >= 0).all()):
        raise ValueError("a bucket's mean has the wrong sign or is not finite")
    if (below[1:] > below[:-1]).any() or (above[1:] < above[:-1]).any():
        raise ValueError("the means of the buckets are not in the order of their magnitudes")
