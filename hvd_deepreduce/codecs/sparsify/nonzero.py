"""Nonzero: for gradients that are sparse already, such as an embedding's (DeepReduce, section 2)."""

from hvd_deepreduce.codecs.interfaces import U32, Floats, RngKey, Sparsifier, sparsifiers
from hvd_deepreduce.ops import select


@sparsifiers.register
class NonZero(Sparsifier):
    """Every element that is not zero. With a lossless value codec nothing is lost.

    With error feedback and a lossy value codec, the rounding error of each element stays in the residual, so that an
    element that was once nonzero is sent again and again: such jobs send less with ``error_feedback: false``.
    """

    name = "nonzero"
    id = 4
    selects_sparse = True

    def select(self, dense: Floats, gradient: Floats | None, key: RngKey, threads: int) -> tuple[U32, Floats]:
        return select.threshold(dense, gradient, 0.0, threads)

    def select_sparse(self, indices: U32, values: Floats, numel: int, key: RngKey, threads: int) -> tuple[U32, Floats]:
        return select.threshold_of(indices, values, 0.0, threads)
