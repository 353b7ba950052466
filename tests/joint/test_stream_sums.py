"""The sum of streams as a dense array, and the values that a packed stream will be decoded to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_deepreduce.joint.densestream import DenseStream
from hvd_deepreduce.joint.stream import Stream
from hvd_deepreduce.joint.stream_format import pack, packed_values, unpack, value_codec
from hvd_deepreduce.ops import stream_exchange
from hvd_deepreduce.ops.hash import hash64
from hvd_deepreduce.sparse import SparseTensor


def stream(rng: np.random.Generator, begin: int, end: int, density: float, gap: int, dtype: type) -> Stream:
    """Blocks inside [begin, end), of a vector that goes on on both sides; longer than a piece of the kernel's sum."""
    kept = np.flatnonzero(rng.random(end - begin) < density)
    if kept.size > 9:
        kept = np.union1d(kept, np.arange(kept[3], kept[-3])) if density > 0.4 else kept
    indices = (kept + begin).astype(np.uint32)
    return Stream.from_indices(end + 9, indices, rng.standard_normal(indices.size).astype(dtype), gap)


@given(
    st.integers(0, 2**32), st.integers(0, 100), st.sampled_from([0, 1, 63, 4096, 4097, 30000]), st.integers(1, 5),
    st.sampled_from([0.0, 0.01, 0.3, 0.5, 1.0]), st.integers(0, 3), st.sampled_from([1.0, 0.3]),
    st.sampled_from([np.float32, np.float64]),
)  # fmt: skip
def test_the_sum_and_its_hash(seed, begin, size, count, density, gap, scale, dtype) -> None:
    rng = np.random.default_rng(seed)
    streams = [stream(rng, begin, begin + size, density, gap, dtype) for _ in range(count)]
    expected = np.zeros(size, dtype)
    for one in streams:
        sparse = one.to_sparse()
        expected[sparse.indices - begin] += sparse.values
    around = np.full(size + 2, np.nan, dtype)
    parts = [(one.starts, one.lengths, one.values) for one in streams]
    found = stream_exchange.sum_to_dense(parts, begin, scale, around[1:-1])
    assert np.array_equal(around[1:-1], expected * dtype(scale))
    assert np.isnan(around[[0, -1]]).all()
    assert found == hash64(around[1:-1])


@pytest.mark.parametrize(
    "codec", [DenseStream(coded=c, value=v) for c in (True, False) for v in ("raw", "float16", "qsgd")]
)
@pytest.mark.parametrize("count", [0, 1, 700])
def test_packed_values_are_those_that_are_unpacked(codec: DenseStream, count: int) -> None:
    rng = np.random.default_rng(count)
    indices = np.sort(rng.choice(2000, count, replace=False)).astype(np.uint32)
    for dtype in (np.float32, np.float64):
        values = rng.standard_normal(count).astype(dtype)
        own = Stream.from_sparse(SparseTensor(2000, indices, values), codec.gap(2000, values.dtype))
        section = pack(own, codec.form, value_codec(codec.value, codec.bits))
        found = packed_values(section, values.dtype)
        assert found.dtype == dtype and np.array_equal(found, unpack(section, 2000, values.dtype).values)
