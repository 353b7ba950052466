"""Sampled top-k: a threshold from a random sample of the elements.

Lin, Han, Mao, Wang, Dally, "Deep gradient compression", ICLR 2018, section 5 (sampled and hierarchical
top-k selection).
"""

import math

import numpy as np
from pydantic import Field

from hvd_deepreduce.codecs.interfaces import U32, Floats, RngKey, Sparsifier, sparsifiers
from hvd_deepreduce.codecs.sparsify.topk import kept_of
from hvd_deepreduce.ops import arrays, random, select

LEAST_KEPT = 64
"""A sample has at least so many elements above the threshold, which makes the relative error of their number 1/8."""


@sparsifiers.register
class SampledTopK(Sparsifier):
    """About ``density * numel`` elements: those that reach the smallest magnitude of the top-k of a random sample.

    If more than ``excess * density * numel`` elements reach it, exact top-k selects from them (DGC's hierarchical
    selection); if fewer than ``density * numel`` do, fewer are sent. Zeros are never sent. The sample is drawn from the
    key.

    Attributes:
        density: the share of elements to keep, in (0, 1].
        sample: the share of elements in the sample, in (0, 1]; small tensors are sampled more densely.
        excess: how many times ``density * numel`` elements are sent without an exact top-k, at least 1.
    """

    name = "sampled_topk"
    id = 6
    density: float = Field(0.01, gt=0, le=1)
    sample: float = Field(0.001, gt=0, le=1)
    excess: float = Field(1.3, ge=1, allow_inf_nan=False)

    def select(self, dense: Floats, gradient: Floats | None, key: RngKey, threads: int) -> tuple[U32, Floats]:
        if dense.size == 0:
            return arrays.zeros(0, np.uint32, dense), dense.copy()
        samples = max(kept_of(self.sample, dense.size), math.ceil(min(dense.size, LEAST_KEPT / self.density)))
        at = random.indices(dense.size, samples, *key[:3], dense)
        sampled = arrays.gather(dense, at)
        if gradient is not None:
            arrays.add(sampled, arrays.gather(gradient, at))
        wanted = kept_of(self.density, samples)
        _, largest = select.topk(sampled, None, wanted, threads)
        # A sample with fewer nonzero elements gives no threshold: all that are not zero are candidates.
        least = float(np.abs(arrays.to_host(largest)).min()) if largest.size == wanted else 0.0
        indices, values = select.threshold(dense, gradient, least, threads)
        kept = kept_of(self.density, dense.size)
        if indices.size > self.excess * kept:
            return select.topk_of(indices, values, kept, threads)
        return indices, values
