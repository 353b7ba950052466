"""Packed: fields of as many bits as the largest index of the tensor needs."""

import numpy as np

from hvd_deepreduce.codecs.interfaces import U8, U32, IndexCodec, RngKey, index_codecs
from hvd_deepreduce.ops import bits


@index_codecs.register
class Packed(IndexCodec):
    """Indices in fields of ceil(log2 d) bits for d elements; lossless. kernels/bits/bits.cpp draws the section."""

    name = "packed"
    id = 2

    def encode(self, indices: U32, numel: int, key: RngKey) -> tuple[U8, U32]:
        return bits.pack(indices, (numel - 1).bit_length()), indices

    @staticmethod
    def decode(section: U8, numel: int, count: int, key: RngKey) -> U32:
        indices: U32 = bits.unpack(section, count, (numel - 1).bit_length(), np.uint32)
        bits.check_indices(indices, numel)
        return indices
