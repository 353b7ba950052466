"""Rice: Golomb-Rice code of the gaps between indices.

Golomb, "Run-length encodings", IEEE Trans. Inf. Theory 1966; Rice and Plaunt, IEEE Trans. Commun. 1971.
"""

from collections.abc import Sequence

import numpy as np

from hvd_deepreduce.codecs.interfaces import U8, U32, IndexCodec, RngKey, encoded_together, index_codecs, no_indices
from hvd_deepreduce.ops import rice


@index_codecs.register
class Rice(IndexCodec):
    """Each gap g as g >> b in unary and its b low bits plain, with the b of the fewest bits for each tensor; lossless.

    b + 1 + (mean of g >> b) bits per kept element: within 1.5% of the entropy log2 C(d, r) / r of random subsets.
    kernels/rice/rice.cpp draws the section.
    """

    name = "rice"
    id = 4

    def encode(self, indices: U32, numel: int, key: RngKey) -> tuple[U8, U32]:
        if indices.size == 0:
            return indices.view(np.uint8), indices
        return rice.encode(indices, numel), indices

    def encode_many(
        self, lists: Sequence[U32], numels: Sequence[int], keys: Sequence[RngKey]
    ) -> list[tuple[U8, U32]]:
        return encoded_together(rice.encode_many, lists, numels)

    @staticmethod
    def decode(section: U8, numel: int, count: int, key: RngKey) -> U32:
        if count == 0:
            return no_indices(section)
        return rice.decode(section, numel, count)

    @classmethod
    def decode_many(cls, sections: Sequence[U8], numel: int, counts: Sequence[int], key: RngKey) -> list[U32]:
        if not all(counts):
            return super().decode_many(sections, numel, counts, key)
        return rice.decode_many(sections, numel, counts)
