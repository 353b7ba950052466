"""Top-k: the elements of largest magnitude.

Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS 2018; the first sparsifier of DeepReduce (section 2).
"""

from functools import lru_cache
from typing import Literal

from pydantic import Field

from hvd_deepreduce.codecs.interfaces import U32, Floats, RngKey, Sparsifier, sparsifiers
from hvd_deepreduce.ops import select


@lru_cache(4096)
def kept_of(density: float, numel: int) -> int:
    """How many of ``numel`` elements a density keeps: ``floor(density * numel)``, but at least one unless ``numel`` is
    0."""
    # The factor keeps products such as 0.29 * 100, which is a little below 29 in binary, from being rounded down.
    return min(numel, max(1, int(density * numel * (1 + 1e-12))))


@sparsifiers.register
class TopK(Sparsifier):
    """The ``floor(density * numel)`` nonzero elements of largest magnitude, at least one; of equal ones the first.

    Zeros are never sent: if there are fewer other elements, these are sent. With ``density_of: nonzeros`` it is
    ``floor(density * n)`` elements, at least one, for n elements that are not zero. An embedding's gradient has few.

    It takes one pass over memory, which accumulates and collects the elements that reach a sampled magnitude; the k
    largest are found among these. With ``density_of: nonzeros`` the pass collects all nonzero elements.

    Attributes:
        density: the share of elements to keep, in (0, 1].
        density_of: what ``density`` is a share of: all ``elements``, or the ``nonzeros``, after the residual is added.
    """

    name = "topk"
    id = 1
    selects_sparse = True
    density: float = Field(0.01, gt=0, le=1)
    density_of: Literal["elements", "nonzeros"] = "elements"

    def select(self, dense: Floats, gradient: Floats | None, key: RngKey, threads: int) -> tuple[U32, Floats]:
        if self.density_of == "elements":
            return select.topk(dense, gradient, kept_of(self.density, dense.size), threads)
        indices, values = select.threshold(dense, gradient, 0.0, threads)
        return select.topk_of(indices, values, kept_of(self.density, values.size), threads)

    def select_sparse(self, indices: U32, values: Floats, numel: int, key: RngKey, threads: int) -> tuple[U32, Floats]:
        if self.density_of == "nonzeros":
            indices, values = select.threshold_of(indices, values, 0.0, threads)
            numel = values.size
        return select.topk_of(indices, values, kept_of(self.density, numel), threads)
