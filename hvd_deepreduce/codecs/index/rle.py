"""RLE: run lengths of the bitmap's bits.

DeepReduce (Kostopoulou et al., "DeepReduce: a sparse-tensor communication framework for federated deep learning",
arXiv:2102.03112), section 2 and appendix "Run Length Encoding".
"""

from hvd_deepreduce.codecs.interfaces import LosslessIndexCodec, index_codecs
from hvd_deepreduce.ops import rle


@index_codecs.register
class RLE(LosslessIndexCodec):
    """The lengths of the runs of zeros and ones, each in fields of their best width; lossless.

    A length that its field cannot hold takes an escape and ceil(log2 d) bits more. A kept element without a kept
    neighbour takes two fields: about log2(1 / density) + 3.6 bits, 1.2 to 1.5 times as many as with ``rice``. Elements
    in long runs take almost none, so RLE pays if whole blocks are kept. kernels/rle/rle.cpp draws the section.
    """

    name = "rle"
    id = 6
    section_of, read = staticmethod(rle.encode), staticmethod(rle.decode)
