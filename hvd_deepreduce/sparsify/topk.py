"""Top-k: the elements of largest magnitude.

Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS 2018; the first sparsifier of DeepReduce (section 2).
"""

from pydantic import Field

from hvd_deepreduce.codec import U32, Floats, RngKey, Sparsifier, sparsifiers
from hvd_deepreduce.ops import select


def kept_of(density: float, numel: int) -> int:
    """How many of ``numel`` elements a density keeps: ``floor(density * numel)``, but at least one unless ``numel`` is
    0."""
    # The factor keeps products such as 0.29 * 100, which is a little below 29 in binary, from being rounded down.
    return min(numel, max(1, int(density * numel * (1 + 1e-12))))


@sparsifiers.register
class TopK(Sparsifier):
    """Exactly ``floor(density * numel)`` elements, at least one; of equal magnitudes those of lower index.

    It takes one pass over memory, which accumulates and collects the elements that reach a sampled magnitude; the k
    largest are found among these.

    Attributes:
        density: the share of elements to keep, in (0, 1].
    """

    name = "topk"
    id = 1
    density: float = Field(0.01, gt=0, le=1)

    def select(self, dense: Floats, gradient: Floats | None, key: RngKey, threads: int) -> tuple[U32, Floats]:
        return select.topk(dense, gradient, kept_of(self.density, dense.size), threads)
