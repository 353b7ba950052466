"""What SketchML and SKCompress share: quantile buckets, and their numbers in grouped MinMaxSketches.

Jiang, Fu, Yang, Cui, "SketchML: accelerating distributed machine learning with data sketches", SIGMOD 2018; as told in
Jiang, Fu, Yang, Shao, Cui, "SKCompress: compressing sparse and nonuniform gradient in distributed machine learning",
VLDB Journal 2020, section 4 and appendix A.2.
"""

from __future__ import annotations

import struct
from abc import ABC
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from hvd_deepreduce.codec import U8, U32, Floats, JointCodec, Key
from hvd_deepreduce.ops import arrays, quantile, sections, sketch

HEADER = struct.Struct("<BxxxIIIHH")
MAX_ROWS, MAX_COLUMNS, MAX_WIDTH, MAX_GROUPS, MAX_BUCKETS = 8, 4, 256, 256, 65536
ONE_COLUMN = 65536
"""The header counts columns in this part of a kept element, so that both sides have the same number."""


class MinMaxSketch(JointCodec, ABC):
    """The settings and the encoder of both codecs; ``coded`` says how a group's keys and bins become bytes: as
    SKCompress has it, or plain.

    Section, empty where nothing is kept:

        | rows u8 | 3 zero bytes | columns u32, in 1/65536 of a group's count | buckets u32 | negative buckets u32 |
        | groups of negative buckets u16 | of others u16 | means float32 [buckets] |
        | a group's count, its bytes of keys, its bytes of bins: u32 [groups, 3] |
        | keys of group 0 | bins of group 0 | keys of group 1 | ...

    The buckets stand as in kernels/sketch/quantile.cpp: negative ones first, and each sign's from small to large
    magnitude. Group j of the g of a sign holds its buckets from floor(j * b / g) on, b being how many the sign has. A
    sketch of v keys has max(1, floor(v * columns / 65536)) bins in a row.
    """

    buckets: int = Field(256, ge=2, le=MAX_BUCKETS)
    groups: int = Field(8, ge=1, le=MAX_GROUPS)
    rows: int = Field(2, ge=1, le=MAX_ROWS)
    columns: float = Field(0.2, ge=0.001, le=MAX_COLUMNS, allow_inf_nan=False)
    center: Literal["mean", "middle"] = "mean"
    coded: ClassVar[bool]

    @model_validator(mode="after")
    def _narrow(self) -> MinMaxSketch:
        if self.buckets > MAX_WIDTH * self.groups:
            raise ValueError(
                f"{self.buckets} buckets in {self.groups} groups are more than {MAX_WIDTH} a group: use more groups"
            )
        return self

    def encode(self, indices: U32 | None, values: Floats, numel: int, key: Key) -> tuple[U8, U32 | None]:
        if values.size == 0:
            return values.view(np.uint8), indices
        every = arrays.arange(numel, values) if indices is None else indices
        x = arrays.to_float32(values)
        means, codes, negative = quantile.encode(x, self.buckets, self.center == "middle")
        groups = [groups_of(side, means.size, self.groups) for side in (negative, means.size - negative)]
        header = HEADER.pack(self.rows, round(self.columns * ONE_COLUMN), means.size, negative, *groups)
        return sketch.encode(header, means, every, codes, self.coded, *key[:3]), indices


def groups_of(side: int, buckets: int, groups: int) -> int:
    """How many groups the ``side`` buckets of one sign get, out of ``groups`` for ``buckets``: its share, rounded; one
    at least, and none wider than ``MAX_WIDTH``."""
    share = (2 * min(groups, buckets) * side + buckets) // (2 * buckets)
    return max(share, -(-side // MAX_WIDTH))


def decode(section: U8, numel: int, count: int, dense: bool, key: Key, coded: bool) -> tuple[U32 | None, Floats]:
    """The support and the values of ``MinMaxSketch.encode``.

    Raises:
        ValueError: for a section that no encoder wrote.
    """
    if dense and count != numel:
        raise ValueError(f"all {numel} elements are wanted, and {count} are there")
    if count == 0 and section.size == 0:
        return None if dense else section.view(np.uint32), section.view(np.float32)
    if section.size < HEADER.size:
        raise ValueError(f"a sketch's section begins with {HEADER.size} bytes, and this one has {section.size}")
    rows, columns, buckets, negative, groups_below, groups_above = HEADER.unpack(sections.peek(section, HEADER.size))
    if not 1 <= rows <= MAX_ROWS or not 1 <= columns <= MAX_COLUMNS * ONE_COLUMN:
        raise ValueError(f"no sketch has {rows} rows and columns {columns}")
    if not negative <= buckets or not 1 <= buckets <= min(count, MAX_BUCKETS):
        raise ValueError(f"{count} values do not lie in {buckets} buckets, {negative} of them negative")
    for side, groups in ((negative, groups_below), (buckets - negative, groups_above)):
        if not -(-side // MAX_WIDTH) <= groups <= min(side, MAX_GROUPS):
            raise ValueError(f"{side} buckets of one sign do not make {groups} groups")
    if section.size < HEADER.size + 4 * buckets + 12 * (groups_below + groups_above):
        raise ValueError(f"the tables of {buckets} buckets do not fit into {section.size} bytes")
    support, values = sketch.decode(section, numel, count, coded, *key[:3])
    return None if dense else support, values
