"""What every sparsifier must do: add the gradient, and select from the sum what its oracle selects, to the bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hvd_deepreduce.codecs.interfaces import RngKey, sparsifiers
from hvd_deepreduce.codecs.sparsify.block_topk import BlockTopK
from hvd_deepreduce.codecs.sparsify.chunk_topk import ChunkTopK
from hvd_deepreduce.codecs.sparsify.none import All
from hvd_deepreduce.codecs.sparsify.nonzero import NonZero
from hvd_deepreduce.codecs.sparsify.randomk import RandomK
from hvd_deepreduce.codecs.sparsify.sampled_topk import SampledTopK
from hvd_deepreduce.codecs.sparsify.threshold import Threshold
from hvd_deepreduce.codecs.sparsify.topk import TopK, kept_of
from hvd_deepreduce.codecs.sparsify.topk_capped import TopKCapped
from tests import cases
from tests.oracle import block_topk, chunk_topk, randomk, sampled_topk, threshold, topk
from tests.oracle.pipeline import accumulated
from tests.selection import examples, first

KEY = RngKey(1, 2, 3)
WORD = st.integers(0, 2**32 - 1)
# Few distinct values, so that most magnitudes and norms are equal, and many are zeros of both signs.
TIED = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 1e-45, -1e-45, 3.4e38, -3.4e38])
DENSITY = st.floats(1e-9, 1)
# Among the thresholds: one between two float32 numbers, one above the largest, and one below the denormals.
LEAST = st.one_of(st.floats(0, 4), st.sampled_from([0.0, 1.0, 0.1, 1e300, 1e-320, 5e-324]))


def topk_oracle(codec, x, key):
    if codec.density_of == "nonzeros":
        return topk.select_of_nonzeros(x, codec.density)
    return topk.select(x, kept_of(codec.density, x.size))


def randomk_oracle(codec, x, key):
    indices = np.array(randomk.indices_of(x.size, kept_of(codec.density, x.size), *key[:3]), np.uint32)
    return indices, x[indices]


SETTINGS = {
    "topk": st.builds(TopK, density=DENSITY, density_of=st.sampled_from(["elements", "nonzeros"])),
    "randomk": st.builds(RandomK, density=DENSITY),
    "threshold": st.builds(Threshold, threshold=LEAST),
    "topk_capped": st.builds(TopKCapped, cap=st.integers(1, 250)),
    "block_topk": st.builds(BlockTopK, density=DENSITY, block=st.integers(1, 40), norm=st.sampled_from(["l2", "l1"])),
    "chunk_topk": st.builds(ChunkTopK, density=DENSITY, chunk=st.integers(1, 70)),
    "sampled_topk": st.builds(SampledTopK, density=DENSITY, sample=st.floats(0.001, 1), excess=st.floats(1, 3)),
    "nonzero": st.just(NonZero()),
    "none": st.just(All()),
}
ORACLES = {
    "topk": topk_oracle,
    "randomk": randomk_oracle,
    "threshold": lambda codec, x, key: threshold.select(x, codec.threshold),
    "topk_capped": lambda codec, x, key: topk.select(x, min(codec.cap, x.size)),
    "block_topk": lambda codec, x, key: block_topk.select(x, codec.density, codec.block, codec.norm == "l2"),
    "chunk_topk": lambda codec, x, key: chunk_topk.select(x, codec.density, codec.chunk),
    "sampled_topk": lambda codec, x, key: sampled_topk.select(x, codec.density, codec.sample, codec.excess, key[:3]),
    "nonzero": lambda codec, x, key: threshold.select(x, 0.0),
    "none": lambda codec, x, key: (None, x),
}
# Settings for tensors of hundreds and of millions of elements.
USUAL = [
    TopK(density=0.1), TopK(density=1.0), TopK(density=0.3, density_of="nonzeros"), RandomK(density=0.1),
    Threshold(threshold=0.5), TopKCapped(cap=1), TopKCapped(cap=100), NonZero(), All(),
    *(BlockTopK(density=d, block=b, norm=n) for d in (0.01, 0.3, 1) for b in (1, 7, 64, 2**31) for n in ("l2", "l1")),
    *(ChunkTopK(density=density, chunk=chunk) for density in (0.01, 0.3, 1) for chunk in (1, 7, 64, 65536)),
    SampledTopK(), SampledTopK(density=0.5, excess=1), SampledTopK(density=1.0), SampledTopK(density=5e-324),
]  # fmt: skip
LARGE = [
    Threshold(threshold=2.5), TopKCapped(cap=30_000), NonZero(), All(), BlockTopK(density=0.3, block=64),
    BlockTopK(density=0.3, block=1 << 19), ChunkTopK(chunk=61), ChunkTopK(chunk=4096), SampledTopK(),
]  # fmt: skip


def same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))


def check(codec, dense, gradient=None, key=KEY):
    """Returns the indices."""
    expected = accumulated(dense, gradient)
    work = dense.copy()
    indices, values = codec.select(work, gradient, key, 1)
    same((indices, values, work), (*ORACLES[codec.name](codec, expected, key), expected))
    assert not np.shares_memory(values, work)
    return indices


def test_every_sparsifier_has_an_oracle():
    assert set(ORACLES) == set(SETTINGS) == set(sparsifiers.by_name)


@pytest.mark.parametrize("name", SETTINGS)
@settings(max_examples=examples(80))
@given(data=st.data(), width=st.sampled_from([32, 64]), tied=st.booleans(), accumulate=st.booleans())
def test_selects_what_the_oracle_selects(name, data, width, tied, accumulate):
    limit = float(np.finfo(f"float{width}").max) / 4
    floats = TIED if tied else st.floats(-limit, limit, width=width)
    dense = data.draw(arrays(f"float{width}", st.integers(0, 200), elements=floats.map(np.dtype(f"float{width}").type)))
    added = st.one_of(st.sampled_from([0.0, 1.0, -1.0, 0.5]), floats).map(dense.dtype.type)
    gradient = data.draw(arrays(dense.dtype, dense.size, elements=added)) if accumulate else None
    check(data.draw(SETTINGS[name]), dense, gradient, RngKey(data.draw(WORD), data.draw(WORD), data.draw(WORD)))


@pytest.mark.parametrize("codec", USUAL, ids=str)
def test_awkward_tensors(codec):
    for dense in cases.inputs().values():
        check(codec, dense)
        check(codec, dense, dense)


@pytest.mark.parametrize("codec", first(LARGE, 5), ids=str)
def test_result_does_not_depend_on_the_threads(codec):
    """With zeros at places, so that the threads' parts leave room behind them."""
    dense, gradient = cases.random((1 << 21) + 77), cases.random((1 << 21) + 77, seed=1)
    dense[1000:90_000] = gradient[1000:90_000] = 0
    found = []
    for threads in (1, 2, 3):
        work = dense.copy()
        found.append((*codec.select(work, gradient, KEY, threads), work))
    same(found[0], found[1])
    same(found[0], found[2])
    same(found[0][2:], [dense + gradient])
