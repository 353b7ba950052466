"""Block top-k: whole blocks of elements.

Fei, Ho, Sahu, Canini, Sapio, "Efficient sparse collective communication and its application to accelerate distributed
deep learning" (OmniReduce), SIGCOMM 2021: Block Top-k.
"""

from typing import Literal

from pydantic import Field

from hvd_deepreduce.codec import U32, Floats, Key, Sparsifier, sparsifiers
from hvd_deepreduce.ops import arrays, select
from hvd_deepreduce.sparsify.topk import kept_of


@sparsifiers.register
class BlockTopK(Sparsifier):
    """The ``floor(density * blocks)`` blocks of largest norm, at least one; of equal norms those of lower index.

    All elements of a block are sent, zeros too; the last block ends with the tensor. The indices come in runs, which
    cost next to nothing in a run-length or Rice code, and other elements are lost than by top-k: large ones in small
    company.

    Attributes:
        density: the share of blocks to keep, in (0, 1].
        block: elements of a block, 1 to 2^31.
        norm: what orders the blocks: ``l2`` or ``l1``, in float64, where float64 gradients beyond 1e154 count alike.
    """

    name = "block_topk"
    id = 7
    density: float = Field(0.01, gt=0, le=1)
    block: int = Field(64, ge=1, le=2**31)
    norm: Literal["l2", "l1"] = "l2"

    def select(self, dense: Floats, gradient: Floats | None, key: Key, threads: int) -> tuple[U32, Floats]:
        norms = select.block_norms(dense, gradient, self.block, self.norm == "l2", threads)
        blocks, _ = select.topk(norms, None, kept_of(self.density, norms.size), threads)
        kept = select.block_indices(blocks, self.block, dense.size)
        return kept, arrays.gather(dense, kept)
