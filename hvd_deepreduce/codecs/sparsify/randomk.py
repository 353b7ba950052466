"""Random-k: a random subset that sender and receiver draw from the same key.

Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS 2018, definition 2.1.
"""

from typing import Any

from pydantic import Field

from hvd_deepreduce.codecs.interfaces import ON_HOST, U32, Floats, RngKey, Sparsifier, sparsifiers
from hvd_deepreduce.codecs.sparsify.topk import kept_of
from hvd_deepreduce.ops import arrays, random


@sparsifiers.register
class RandomK(Sparsifier):
    """``floor(density * numel)`` elements, at least one, chosen by a keyed permutation of the indices.

    Without an ``index`` the indices take no bytes: a receiver repeats the choice from the key (seed, parameter, step)
    in the header. With an ``index`` that codec sends them, as in the papers' experiments with Bloom filters. All ranks
    of a job draw the same indices, so the supports of their containers are equal.

    Attributes:
        density: the share of elements to keep, in (0, 1].
    """

    name = "randomk"
    id = 2
    shared_randomness = True
    density: float = Field(0.01, gt=0, le=1)

    def select(self, dense: Floats, gradient: Floats | None, key: RngKey, threads: int) -> tuple[U32, Floats]:
        if gradient is not None:
            arrays.add(dense, gradient, threads)
        indices = self.indices_of(dense.size, kept_of(self.density, dense.size), key, dense)
        return indices, arrays.gather(dense, indices)

    @staticmethod
    def indices_of(numel: int, count: int, key: RngKey, like: Any = ON_HOST) -> U32:
        return random.indices(numel, count, *key[:3], like)
