"""Huffman: DeepReduce's static byte code of the indices.

DeepReduce (Kostopoulou et al., arXiv:2102.03112), appendix "Huffman Encoding".
"""

from hvd_deepreduce.codecs.interfaces import LosslessIndexCodec, index_codecs
from hvd_deepreduce.ops import huffman


@index_codecs.register
class Huffman(LosslessIndexCodec):
    """The four bytes of each index in the Huffman code of the bytes of all indices 0 .. d - 1; lossless.

    Sender and receiver build the code from d alone. It is here because the paper has it, but it compresses badly, since
    it uses neither the order of the indices nor much more than their high zero bytes: 19.7 bits per index for
    d = 36,864 (``packed`` takes 16, ``rice`` 8.2 at a density of 1%) and 28.2 bits for d = 25.6 million (``packed`` 25,
    ``rice`` 8.1). kernels/huffman/huffman.cpp draws the section.
    """

    name = "huffman"
    id = 7
    section_of, read = staticmethod(huffman.encode_indices), staticmethod(huffman.decode_indices)
