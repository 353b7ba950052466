"""Threshold: every element of at least a given magnitude.

Strom, "Scalable distributed DNN training using commodity GPU cloud computing", Interspeech 2015; DeepReduce, section 2.
"""

from pydantic import Field

from hvd_deepreduce.codecs.interfaces import U32, Floats, RngKey, Sparsifier, sparsifiers
from hvd_deepreduce.ops import select


@sparsifiers.register
class Threshold(Sparsifier):
    """The elements with ``|x| >= threshold`` except zeros. Their number depends on the gradient and may be 0.

    Attributes:
        threshold: the magnitude, in the gradient's unit, at least 0.
    """

    name = "threshold"
    id = 3
    selects_sparse = True
    threshold: float = Field(ge=0, allow_inf_nan=False)

    def select(self, dense: Floats, gradient: Floats | None, key: RngKey, threads: int) -> tuple[U32, Floats]:
        return select.threshold(dense, gradient, self.threshold, threads)

    def select_sparse(self, indices: U32, values: Floats, numel: int, key: RngKey, threads: int) -> tuple[U32, Floats]:
        return select.threshold_of(indices, values, self.threshold, threads)
