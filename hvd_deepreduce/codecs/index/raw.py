"""Raw: 32 bits per index, as the keys of the key-value pairs that sparse libraries send."""

import numpy as np

from hvd_deepreduce.codecs.interfaces import U8, U32, IndexCodec, RngKey, index_codecs
from hvd_deepreduce.ops import bits


@index_codecs.register
class Raw(IndexCodec):
    """Indices as little-endian uint32. 32 bits per kept element; lossless."""

    name = "raw"
    id = 1

    def encode(self, indices: U32, numel: int, key: RngKey) -> tuple[U8, U32]:
        return indices.view(np.uint8), indices

    @staticmethod
    def decode(section: U8, numel: int, count: int, key: RngKey) -> U32:
        if section.size != 4 * count:
            raise ValueError(f"the section has {section.size} bytes: {count} raw indices take {4 * count}")
        indices = section.view(np.uint32)
        bits.check_indices(indices, numel)
        return indices
