"""Top-k: the elements of largest magnitude.

Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS 2018; the first sparsifier of DeepReduce (section 2).
"""

from pydantic import Field

from hvd_deepreduce.codec import U32, Floats, Key, Sparsifier, sparsifiers
from hvd_deepreduce.ops import select


def kept_of(density: float, numel: int) -> int:
    """How many of ``numel`` elements a density keeps: the whole part of the product, but at least one of a tensor that
    is not empty."""
    # 0.29 * 100 is a little below 29 in binary.
    return min(numel, max(1, int(density * numel * (1 + 1e-12))))


@sparsifiers.register
class TopK(Sparsifier):
    """Exactly ``floor(density * numel)`` elements, at least one; of equal magnitudes those of lower index.

    One pass over memory: accumulate, keep what a sampled magnitude lets through, find the k largest of that.

    Attributes:
        density: the share of elements to keep, in (0, 1].
    """

    name = "topk"
    id = 1
    density: float = Field(0.01, gt=0, le=1)

    def select(self, dense: Floats, gradient: Floats | None, key: Key, threads: int) -> tuple[U32, Floats]:
        return select.topk(dense, gradient, kept_of(self.density, dense.size), threads)
