"""The sum of streams as a dense array, and the values that a packed stream will be decoded to."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_deepreduce.codecs.joint.densestream import DenseStream
from hvd_deepreduce.codecs.joint.stream import Stream
from hvd_deepreduce.codecs.joint.stream_format import pack, packed_values, unpack, value_codec
from hvd_deepreduce.codecs.sparse_tensor import SparseTensor
from hvd_deepreduce.ops import stream_exchange
from hvd_deepreduce.ops.hash import hash64
from tests.selection import thorough


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


@given(
    st.integers(0, 2**32), st.sampled_from([0, 1, 63, 4000, 2**32 - 2000011]), st.sampled_from([1, 64, 4097, 20000]),
    st.sampled_from([0.02, 0.3, 0.5, 1.0]), st.sampled_from([0.001, 0.1, 0.5]), st.integers(0, 3), st.booleans(),
    st.booleans(),
    st.sampled_from([np.float32, np.float64]),
)  # fmt: skip
def test_merged_streams_of_many_blocks(seed, begin, size, density, other, gap, nan, far, dtype) -> None:
    """Bit by bit: an element of one stream is copied, also -0 and NaN; the sum has the blocks of the union."""
    rng = np.random.default_rng(seed)
    parts = []
    for share in (density, other):
        part = stream(rng, begin, begin + size, share, gap, dtype)
        if far:  # the same slice of another region
            moved = Stream(2**32 - 1, part.starts + np.uint32(10**6 + 7), part.lengths, part.values.copy())
            part = Stream.concatenate([Stream(2**32 - 1, part.starts, part.lengths, part.values), moved])
        part.values[rng.random(part.values.size) < 0.1] = -0.0
        if nan and part.values.size:
            part.values[part.values.size // 2] = np.nan
        parts.append(part)
    sparse = [SparseTensor(one.numel, one.indices(), one.values) for one in parts]
    indices = np.union1d(sparse[0].indices, sparse[1].indices)
    rows = np.zeros((2, indices.size), dtype)
    has = np.zeros((2, indices.size), bool)
    for row, there, one in zip(rows, has, sparse, strict=True):
        at = np.searchsorted(indices, one.indices)
        row[at], there[at] = one.values, True
    values = np.where(has.all(0), rows[0] + rows[1], np.where(has[0], rows[0], rows[1]))
    expected = Stream.from_indices(parts[0].numel, indices, values, gap)
    found = parts[0].merge(parts[1], gap)
    for name in ("starts", "lengths", "values"):
        assert getattr(found, name).tobytes() == getattr(expected, name).tobytes(), name


@given(st.integers(0, 2**32), st.integers(0, 3), st.sampled_from([np.float32, np.float64]), st.floats(0.01, 1))
def test_pieces_are_the_streams_of_their_elements(seed, gap, dtype, density) -> None:
    rng = np.random.default_rng(seed)
    indices = np.flatnonzero(rng.random(3000) < density).astype(np.uint32)
    tensor = SparseTensor(3000, indices, rng.standard_normal(indices.size).astype(dtype))
    for count in (1, 4):
        pieces = np.sort(rng.integers(0, indices.size + 1, 2 * count)).astype(np.uint64).reshape(-1, 2)
        found = Stream.from_pieces(tensor, pieces, gap)
        parts = [Stream.from_indices(3000, indices[a:b], tensor.values[a:b], gap) for a, b in pieces.tolist()]
        expected = Stream.concatenate(parts)
        for name in ("starts", "lengths", "values"):
            assert np.array_equal(getattr(found, name), getattr(expected, name)), name


@thorough
def test_the_portable_code_gives_the_same() -> None:
    """The tests above compare with NumPy; here without vector instructions."""
    env = os.environ | {"HVD_DEEPREDUCE_VECTOR": "portable", "PYTHONPATH": os.pathsep.join(sys.path)}
    tests = "test_the_sum_and_its_hash", "test_merged_streams_of_many_blocks", "test_pieces_are_the_streams"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", " or ".join(tests), __file__]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout
