"""Context: the numbers of indices in windows of 128 elements, coded in the context of the windows before.

Adaptive models of sixteen symbols as in AV1 (de Rivaz, Haughton, "AV1 bitstream & decoding process specification",
2019, section 8.3); the coder: Duda, arXiv:1311.2540, 2013.
"""

import numpy as np

from hvd_deepreduce.codec import U8, U32, IndexCodec, RngKey, index_codecs, no_indices
from hvd_deepreduce.ops import arrays, context


@index_codecs.register
class Context(IndexCodec):
    """An adaptive coder of how many indices a window of 128 elements has, and of where they are in it; lossless.

    The smallest of the index codecs where the density changes from tensor to tensor and from row to row, and the
    slowest but for ``bloom``: a core codes 20 to 60 million indices a second, ``rice_blocks`` a billion. It takes 2%
    fewer bytes than ``rice_blocks`` on the accumulators of ResNet-50, and 13% fewer on those of a small transformer
    (docs/benchmarks.md). Symbols depend on those before, so it runs on one core of the host, also for gradients on a
    GPU. kernels/context/context.cpp draws the section.
    """

    name = "context"
    id = 13

    def encode(self, indices: U32, numel: int, key: RngKey) -> tuple[U8, U32]:
        if indices.size == 0:
            return indices.view(np.uint8), indices
        return arrays.move_like(context.encode(arrays.to_host(indices), numel), indices), indices

    @staticmethod
    def decode(section: U8, numel: int, count: int, key: RngKey) -> U32:
        if count == 0:
            return no_indices(section)
        return arrays.move_like(context.decode(arrays.to_host(section), numel, count)[0], section)
