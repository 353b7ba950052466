"""SketchML: quantile buckets in MinMaxSketches, and keys as gaps of whole bytes.

Jiang, Fu, Yang, Cui, "SketchML: accelerating distributed machine learning with data sketches", SIGMOD 2018; SKCompress
(joint/skcompress.py), sections 4.1, 4.2 and 5.1, without its entropy codes.
"""

from hvd_deepreduce.codecs.interfaces import joint_codecs
from hvd_deepreduce.codecs.joint.minmax_sketch import MinMaxSketch


@joint_codecs.register
class SketchML(MinMaxSketch):
    """Values become numbers of quantile buckets (value/quantile.py), which are stored in MinMaxSketches with fewer bins
    than numbers, one sketch for each group of neighbouring buckets. If keys collide in a bin, it keeps the smallest
    number, and a key gets the largest number of its rows: a decoded magnitude is that of the key's bucket or of a
    smaller bucket of the same group, never a larger one, and never of the other sign. If a group has v keys in rows of
    t bins, the l-th largest number is decoded with the probability 1 - (1 - (1 - 1/t)^(v-l))^s, or a higher one if
    numbers are equal (equation 2, which counts from the least number; the mean is the same). The hash is the Murmur
    finalizer of common.h, keyed by the container's seed, parameter and step, so that a key collides with other keys in
    each step.

    Keys are lossless: each group's gaps in 1 to 4 bytes, and 2 bits for the number of bytes. A kept element costs s *
    columns * ceil(log2(q / g)) bits for its value (2 by default), 10, 18 or 26 for its key (mostly 10 if the density is
    far above g / 256), and its share of the table of means. Elements of a dense tensor have no keys, but the number of
    their group, ceil(log2 g) bits (joint/dense_sketch.py).

    Section: as in joint/minmax_sketch.py. kernels/sketch/flagged_keys.h draws a group's keys; its bins are fields of
    ceil(log2 w) bits for a group of w buckets.

    The defaults are those of the papers: q = 256 (section 4.1), g = 8 (4.2), two rows of a fifth of the kept elements
    (7.5).

    Attributes:
        buckets: q, the most buckets of both signs together, 2 to 65536, and up to 256 for each group.
        groups: g, 1 to 256, which the signs share by their numbers of buckets: more have smaller errors, but larger
            gaps between keys.
        rows: s, the rows of a sketch, 1 to 8.
        columns: bins in a row for each kept element, 0.001 to 4: more have fewer collisions.
        center: as in ``quantile``.
    """

    name = "sketchml"
    id = 2
    coded = False
