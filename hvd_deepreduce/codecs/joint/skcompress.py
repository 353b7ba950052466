"""SKCompress: SketchML with Huffman codes for the sketches' bins and for the lengths of the keys' gaps.

Jiang, Fu, Yang, Shao, Cui, "SKCompress: compressing sparse and nonuniform gradient in distributed machine learning",
VLDB Journal 2020, sections 4 to 6 and appendix A.
"""

from hvd_deepreduce.codecs.interfaces import joint_codecs
from hvd_deepreduce.codecs.joint.minmax_sketch import MinMaxSketch


@joint_codecs.register
class SKCompress(MinMaxSketch):
    """Values as in ``sketchml`` (joint/sketchml.py), with the same loss and settings, but a group's bins are Huffman
    coded (section 4.3: a bin keeps small numbers, so they are more frequent), and its keys are delta-binary with the
    adaptive prefix of section 5.2 (index/delta.py).

    A kept element costs s * columns * H bits for its value, where H is the entropy of a bin, 4.1 bits for five keys in
    a bin and 32 buckets in a group (1.7 bits in all by default); about 2.1 + log2(g / density) for its key, of which
    log2(g) tell its group (11.8 at a density of 1%); and its share of the table of means. That is 13.5 bits at a
    density of 1%, where plain ``sketchml`` takes 17.8.

    A dense tensor has no keys (section 7.7; joint/dense_sketch.py): about log2(g) bits tell the group of each element,
    1 if ``groups`` is 1 and each sign has one sketch. Without sketches (DeepReduce, section 6.3) the codec is the index
    codec ``delta`` and the value codec ``quantile``; docs/papers.md has the config of each published variant.

    Section: as in joint/minmax_sketch.py. kernels/delta/delta.cpp draws a group's keys, kernels/huffman/huffman.cpp its
    bins.

    Attributes:
        buckets, groups, rows, columns, center: as in ``sketchml``.
    """

    name = "skcompress"
    id = 1
    coded = True
