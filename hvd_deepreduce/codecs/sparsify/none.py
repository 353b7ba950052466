"""None: all elements, for codecs of dense gradients (QSGD, TernGrad, SignSGD and 3LC as published)."""

from hvd_deepreduce.codecs.interfaces import U32, Floats, RngKey, Sparsifier, sparsifiers
from hvd_deepreduce.ops import arrays


@sparsifiers.register
class All(Sparsifier):
    """Every element, in order. No index section is sent, and the container's sparsifier number is 0."""

    name = "none"
    id = 255
    sends_all = True

    def select(self, dense: Floats, gradient: Floats | None, key: RngKey, threads: int) -> tuple[U32 | None, Floats]:
        if gradient is not None:
            arrays.add(dense, gradient, threads)
        return None, dense.copy()
