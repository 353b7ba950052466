"""SketchML: quantile buckets in MinMaxSketches, and keys as gaps of whole bytes.

Jiang, Fu, Yang, Cui, "SketchML: accelerating distributed machine learning with data sketches", SIGMOD 2018; SKCompress
(joint/skcompress.py), sections 4.1, 4.2 and 5.1, without its entropy codes.
"""

from typing import Any

import numpy as np

from hvd_deepreduce.codec import U8, U32, Floats, Key, joint_codecs
from hvd_deepreduce.joint.minmax_sketch import MinMaxSketch, decode


@joint_codecs.register
class SketchML(MinMaxSketch):
    """Values become numbers of quantile buckets (value/quantile.py); the numbers lie in MinMaxSketches, a group of
    neighbouring buckets each, whose bins are fewer than the numbers. Where keys collide in a bin the smallest number
    stays, and a key gets the largest out of its rows: a decoded magnitude is its own bucket's or that of a smaller
    bucket of the same group, never more, and never of the other sign. A group with v keys in t bins a row gives the
    number whose rank among them is l with the probability 1 - (1 - (1 - 1/t)^(v-l))^s back, or a higher one where
    numbers are equal (equation 2). Hashes: common.h's Murmur finalizer, under the container's seed, parameter and
    step, so that keys collide with others in each step.

    Keys are lossless: each group's gaps in 1 to 4 bytes and 2 bits that say how many. A kept element costs
    s * columns * ceil(log2(q / g)) bits for its value (2 as a default), 10, 18 or 26 for its key (mostly 10 where the
    density is far above g / 256), and its share of the table of means.

    Section: joint/minmax_sketch.py; a group's keys are drawn at the end of kernels/sketch/sketch.cpp, its bins are
    fields of ceil(log2 w) bits for a group of w buckets.

    The defaults are the papers': q = 256 (section 4.1), g = 8 (4.2), two rows of a fifth of the kept elements (7.5).

    Attributes:
        buckets: q, at most 2 to 65536 of both signs together, up to 256 a group.
        groups: g, 1 to 256, shared out by the buckets of each sign: more err less, but their keys lie farther apart.
        rows: s, 1 to 8, of a sketch.
        columns: bins of a row for each kept element, 0.001 to 4: more collide less.
        center: as in value/quantile.py.
    """

    name = "sketchml"
    id = 2
    coded = False

    @staticmethod
    def decode(
        section: U8, numel: int, count: int, dense: bool, dtype: np.dtype[Any], key: Key
    ) -> tuple[U32 | None, Floats]:
        return decode(section, numel, count, dense, key, False)
