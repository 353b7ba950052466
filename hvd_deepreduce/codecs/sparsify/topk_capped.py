"""Capped top-k: at most a given number of elements of each tensor.

Basu, Data, Karakus, Diggavi, "Qsparse-local-SGD", NeurIPS 2019, section 5 (experiment setup).
"""

from pydantic import Field

from hvd_deepreduce.codecs.interfaces import U32, Floats, RngKey, Sparsifier, sparsifiers
from hvd_deepreduce.ops import select


@sparsifiers.register
class TopKCapped(Sparsifier):
    """The ``min(numel, cap)`` elements of largest magnitude; of equal magnitudes those of lower index.

    Zeros are never sent: if there are fewer other elements, these are sent. Small tensors (biases, normalizations) are
    sent whole, and ``cap`` elements of large ones: the paper's 1000 sends 99,400 of the 25.6 million elements of
    ResNet-50.

    Attributes:
        cap: the most elements of one tensor, at least 1.
    """

    name = "topk_capped"
    id = 5
    selects_sparse = True
    cap: int = Field(1000, ge=1, lt=2**32)

    def select(self, dense: Floats, gradient: Floats | None, key: RngKey, threads: int) -> tuple[U32, Floats]:
        return select.topk(dense, gradient, min(self.cap, dense.size), threads)

    def select_sparse(self, indices: U32, values: Floats, numel: int, key: RngKey, threads: int) -> tuple[U32, Floats]:
        return select.topk_of(indices, values, min(self.cap, numel), threads)
