"""What SketchML and SKCompress share: quantile buckets, and their numbers in grouped MinMaxSketches.

Jiang, Fu, Yang, Cui, "SketchML: accelerating distributed machine learning with data sketches", SIGMOD 2018; as
described in Jiang, Fu, Yang, Shao, Cui, "SKCompress: compressing sparse and nonuniform gradient in distributed machine
learning", VLDB Journal 2020, section 4 and appendix A.2.
"""

from __future__ import annotations

from abc import ABC
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from hvd_deepreduce.codecs.interfaces import U8, U32, Floats, JointCodec, RngKey
from hvd_deepreduce.codecs.joint import dense_sketch
from hvd_deepreduce.ops import arrays, quantile, sections, sketch
from hvd_deepreduce.ops.sketch import HEADER, MAX_ROWS, Header

MAX_COLUMNS, MAX_WIDTH, MAX_GROUPS, MAX_BUCKETS = 4, 256, 256, 65536
ONE_COLUMN = 65536
"""The header's ``columns`` for one column for each kept element; an integer, so that all ranks compute the same
sizes."""


class MinMaxSketch(JointCodec, ABC):
    """The settings, the encoder and the decoder of both codecs. ``coded``: whether a group's keys and bins are entropy
    coded, as in SKCompress.

    Section, empty if nothing is kept:

        | rows u8 | form 0 u8 | 2 zero bytes | columns u32, in 1/65536 of a group's count | buckets u32 |
        | negative buckets u32 | groups of negative buckets u16 | of others u16 | means float32 [buckets] |
        | a group's count, its bytes of keys, its bytes of bins: u32 [groups, 3] |
        | keys of group 0 | bins of group 0 | keys of group 1 | ...

    The buckets are in the order of kernels/quantile/quantile.h: negative ones first, and those of each sign from small
    to large magnitude. If a sign has b buckets in g groups, group j begins with the bucket floor(j * b / g). A sketch
    of v keys has max(1, floor(v * columns / 65536)) bins in a row.

    A dense tensor is sent without keys (SKCompress, section 7.7). Which elements are in a group must still be told: by
    the group's number of each element, ceil(log2 groups) bits, or Huffman coded if ``coded`` (joint/dense_sketch.py).
    """

    buckets: int = Field(256, ge=2, le=MAX_BUCKETS)
    groups: int = Field(8, ge=1, le=MAX_GROUPS)
    rows: int = Field(2, ge=1, le=MAX_ROWS)
    columns: float = Field(0.2, ge=0.001, le=MAX_COLUMNS, allow_inf_nan=False)
    center: Literal["mean", "middle"] = "mean"
    coded: ClassVar[bool]

    @model_validator(mode="after")
    def _check_group_widths(self) -> MinMaxSketch:
        if self.buckets > MAX_WIDTH * self.groups:
            raise ValueError(
                f"{self.buckets} buckets in {self.groups} groups are more than {MAX_WIDTH} for a group: use more groups"
            )
        return self

    def encode(self, indices: U32 | None, values: Floats, numel: int, key: RngKey) -> tuple[U8, U32 | None]:
        if values.size == 0:
            return values.view(np.uint8), indices
        x = arrays.to_float32(values)
        means, codes, negative = quantile.encode(x, self.buckets, self.center == "middle")
        below, above = (groups_of(side, means.size, self.groups) for side in (negative, means.size - negative))
        header = Header(self.rows, round(self.columns * ONE_COLUMN), means.size, negative, below, above)
        if indices is None:
            return dense_sketch.encode(header, means, codes, self.coded, (key.seed, key.parameter, key.step)), None
        return sketch.encode(header, means, indices, codes, self.coded, *key[:3]), indices

    @classmethod
    def decode(
        cls, section: U8, numel: int, count: int, dense: bool, dtype: np.dtype[Any], key: RngKey
    ) -> tuple[U32 | None, Floats]:
        if dense and count != numel:
            raise ValueError(f"a dense tensor of {numel} elements cannot come from a section of {count}")
        if count == 0 and section.size == 0:
            return None if dense else section.view(np.uint32), section.view(np.float32)
        if section.size < HEADER.size:
            raise ValueError(f"a section of sketches begins with {HEADER.size} bytes, and this one has {section.size}")
        header = Header.of(section)
        rows, columns, buckets, negative, groups_below, groups_above, form = header
        if any(sections.peek(section, HEADER.size)[2:4]) or form > dense_sketch.FORM or (form and not dense):
            raise ValueError(
                "the byte after its number of rows must be 0, or 1 for a dense tensor, and the two bytes after that 0"
            )
        if not 1 <= rows <= MAX_ROWS or not 1 <= columns <= MAX_COLUMNS * ONE_COLUMN:
            raise ValueError(
                f"its sketches have {rows} rows and {columns} columns; 1 to {MAX_ROWS} and 1 to "
                f"{MAX_COLUMNS * ONE_COLUMN} are allowed"
            )
        if not negative <= buckets or not 1 <= buckets <= min(count, MAX_BUCKETS):
            raise ValueError(f"{count} values cannot have {buckets} buckets, {negative} of them negative")
        for side, groups in ((negative, groups_below), (buckets - negative, groups_above)):
            if not -(-side // MAX_WIDTH) <= groups <= min(side, MAX_GROUPS):
                raise ValueError(f"{side} buckets of one sign cannot be in {groups} groups")
        if section.size < header.parts_at:
            raise ValueError(f"the tables of {buckets} buckets do not fit into {section.size} bytes")
        if form:
            return None, dense_sketch.decode(section, count, cls.coded, (key.seed, key.parameter, key.step))
        support, values = sketch.decode(section, numel, count, cls.coded, *key[:3])
        return None if dense else support, values


def groups_of(side: int, buckets: int, groups: int) -> int:
    """The number of groups for the ``side`` buckets of one sign, if ``buckets`` of both signs share ``groups``: its
    share, rounded, and enough for at most ``MAX_WIDTH`` buckets in a group."""
    share = (2 * min(groups, buckets) * side + buckets) // (2 * buckets)
    return max(share, -(-side // MAX_WIDTH))
