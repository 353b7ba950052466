"""Block top-k: whole blocks of elements.

Fei, Ho, Sahu, Canini, Sapio, "Efficient sparse collective communication and its application to accelerate distributed
deep learning" (OmniReduce), SIGCOMM 2021: Block Top-k.
"""

from typing import Literal

import numpy as np
from pydantic import Field

from hvd_deepreduce.codecs.interfaces import U32, Floats, RngKey, Sparsifier, sparsifiers
from hvd_deepreduce.codecs.sparsify.topk import kept_of
from hvd_deepreduce.ops import arrays, blocks, select


@sparsifiers.register
class BlockTopK(Sparsifier):
    """The ``floor(density * blocks)`` blocks of largest norm, at least one; of equal norms those of lower index.

    All elements of a selected block are sent, zeros too; the last block ends with the tensor. Blocks of zeros are never
    sent: if there are fewer other blocks, these are sent. The indices come in runs, which take almost no bits in a
    run-length or Rice code. Unlike top-k, it does not send large elements among small ones.

    Attributes:
        density: the share of blocks to keep, in (0, 1].
        block: elements of a block, 1 to 2^31.
        norm: ``l2`` or ``l1``, computed in float64. Blocks with float64 elements beyond 1e154 have equal l2 norms, and
            blocks of float64 elements below 1e-162 count as zeros.
    """

    name = "block_topk"
    id = 7
    density: float = Field(0.01, gt=0, le=1)
    block: int = Field(64, ge=1, le=2**31)
    norm: Literal["l2", "l1"] = "l2"

    def select(self, dense: Floats, gradient: Floats | None, key: RngKey, threads: int) -> tuple[U32, Floats]:
        if self.block == 1 and dense.dtype == np.float32:  # its norms have the order of its magnitudes
            return select.topk(dense, gradient, kept_of(self.density, dense.size), threads)
        norms = blocks.norms(dense, gradient, self.block, self.norm == "l2", threads)
        largest, _ = select.topk(norms, None, kept_of(self.density, norms.size), threads)
        indices = blocks.indices(largest, self.block, dense.size)
        return indices, arrays.gather(dense, indices)
