"""Chunk top-k: the largest elements of each chunk of consecutive elements.

Sarfi, Thérien, Lidin, Belilovsky, "Communication efficient LLM pre-training with SparseLoCo", 2025: top-k in chunks of
4,096 elements. Peng, Quesnelle, Kingma, "DeMo: decoupled momentum optimization", 2024, selects in chunks too, after a
cosine transform that is not made here.
"""

from pydantic import Field

from hvd_deepreduce.codecs.interfaces import U32, Floats, RngKey, Sparsifier, sparsifiers
from hvd_deepreduce.codecs.sparsify.topk import kept_of
from hvd_deepreduce.ops import select


@sparsifiers.register
class ChunkTopK(Sparsifier):
    """The ``floor(density * chunk)`` nonzero elements of largest magnitude of each chunk, at least one.

    A chunk is ``chunk`` consecutive elements of the flat tensor (with a larger scope: of the scope's vector); the last
    one ends with the tensor, and its share is of its own size. Of equal magnitudes, those of lower index are sent.
    Zeros are never sent: if a chunk has fewer other elements, these are sent. Every part of the tensor sends, whatever
    its scale, so less of the largest elements than with ``topk``; and each chunk is selected from while it is in the
    cache.

    Attributes:
        density: the share of each chunk's elements to keep, in (0, 1]; by default 64 of 4,096.
        chunk: elements of a chunk, 1 to 65,536.
    """

    name = "chunk_topk"
    id = 8
    density: float = Field(0.015625, gt=0, le=1)
    chunk: int = Field(4096, ge=1, le=65536)

    def select(self, dense: Floats, gradient: Floats | None, key: RngKey, threads: int) -> tuple[U32, Floats]:
        last = dense.size - max(0, -(-dense.size // self.chunk) - 1) * self.chunk
        k, of_last = kept_of(self.density, self.chunk), kept_of(self.density, last)
        return select.topk_of_chunks(dense, gradient, self.chunk, k, of_last, threads)
