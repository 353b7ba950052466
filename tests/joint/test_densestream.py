"""The DenseStream representation, its byte format and the joint codec."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.joint.densestream import DenseStream
from hvd_deepreduce.codecs.joint.stream import Stream, coded_gap, covered_indices, plain_gap
from hvd_deepreduce.codecs.joint.stream_format import CODED, HEADER, PAIRS, PLAIN, pack, unpack
from hvd_deepreduce.codecs.sparse_tensor import SparseTensor
from tests.oracle import densestream as oracle
from tests.oracle import rice
from tests.selection import examples

F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
KEY = RngKey(3, 1, 4, 1)
VALUES = ["raw", "float16", "bfloat16", "qsgd"]
quick = settings(derandomize=True, max_examples=examples(60), deadline=None)


@st.composite
def tensors(draw: st.DrawFn, numel: int | None = None, dtype: np.dtype | None = None) -> SparseTensor:
    n = numel if numel is not None else draw(st.sampled_from([1, 2, 3, 7, 64, 257, 65536, 65537, 2**24 + 1, 2**32 - 1]))
    # Clusters: a random start, followed by indices with small gaps.
    indices: set[int] = set()
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, n - 1))
        for step in draw(st.lists(st.integers(1, 6), max_size=8)):
            indices.add(at)
            at += step
    ordered = np.array(sorted(i for i in indices if i < n), np.uint32)
    finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
    values = draw(st.lists(finite, min_size=ordered.size, max_size=ordered.size))
    return SparseTensor(n, ordered, np.array(values, dtype or draw(st.sampled_from([F32, F64]))))


def kept(tensor: SparseTensor) -> dict[int, float]:
    return dict(zip(tensor.indices.tolist(), tensor.values.tolist(), strict=True))


def as_blocks(stream: Stream) -> list[tuple[int, list[float]]]:
    found, at = [], 0
    for start, length in zip(stream.starts.tolist(), stream.lengths.tolist(), strict=True):
        found.append((start, stream.values[at : at + length].tolist()))
        at += length
    return found


def random_tensor(numel: int, count: int, seed: int, dtype: np.dtype = F32) -> SparseTensor:
    rng = np.random.default_rng(seed)
    indices = np.sort(rng.choice(numel, count, replace=False)).astype(np.uint32)
    return SparseTensor(numel, indices, rng.standard_normal(count).astype(dtype))


def test_gap_equals_the_paper() -> None:
    # Section III.A and figure 2: blocks contain up to two zeros if starts, lengths and values have 4 bytes.
    assert plain_gap(2**32 - 1, 32) == plain_gap(24_000_000, 32) == 2
    assert plain_gap(134_000_000, 32) == 2
    for numel in (1, 2, 255, 256, 257, 65536, 65537, 2**24, 2**24 + 1, 2**32 - 1):
        for value_bytes in (1, 2, 4, 8):
            assert plain_gap(numel, 8 * value_bytes) == oracle.gap(numel, value_bytes)
    assert (coded_gap(32), coded_gap(16), coded_gap(8), coded_gap(4)) == (0, 0, 1, 2)


def test_figure_2() -> None:
    x = [0, 9, 9, 9, 0, 0, 0, 9, 0, 9, 0, 0, 0, 9, 0, 0, 9, 0, 0, 0, 9, 9]
    indices = np.flatnonzero(x).astype(np.uint32)
    stream = Stream.from_sparse(SparseTensor(len(x), indices, np.full(indices.size, 9, np.float32)), 2)
    assert as_blocks(stream) == [(1, [9, 9, 9]), (7, [9, 0, 9]), (13, [9, 0, 0, 9]), (20, [9, 9])]


@quick
@given(tensors(), st.integers(0, 4))
def test_blocks_equal_the_oracle(tensor: SparseTensor, gap: int) -> None:
    stream = Stream.from_sparse(tensor, gap)
    assert as_blocks(stream) == oracle.blocks(kept(tensor), gap)
    assert pack(stream, PLAIN).tobytes() == oracle.plain(kept(tensor), tensor.numel, gap, tensor.values.dtype.type)
    back = stream.to_sparse()
    keep = tensor.values != 0
    assert np.array_equal(back.indices, tensor.indices[keep]) and np.array_equal(back.values, tensor.values[keep])
    assert np.array_equal(covered_indices(tensor.indices, gap), stream.indices())


@quick
@given(tensors(), st.integers(0, 3))
def test_coded_bytes_equal_the_oracle(tensor: SparseTensor, gap: int) -> None:
    stream = Stream.from_sparse(tensor, gap)
    section = pack(stream, CODED)
    *_, a_bytes, b_bytes, _ = HEADER.unpack_from(section.data)
    found = oracle.blocks(kept(tensor), gap)
    if not found:
        assert a_bytes == b_bytes == 0
        return
    ends = [0] + [start + len(values) for start, values in found]
    skips = [start - end for (start, _), end in zip(found, ends, strict=False)]
    a = section[HEADER.size : HEADER.size + a_bytes]
    b_at = HEADER.size + -(-a_bytes // 8) * 8
    b = section[b_at : b_at + b_bytes]
    # The encoder is free to choose the Rice parameter; the parameter determines all other bits.
    assert a.tobytes() == rice.of_gaps(skips, int(a[0]))
    assert b.tobytes() == rice.of_gaps([len(values) - 1 for _, values in found], int(b[0]))


@quick
@given(st.data(), st.integers(0, 3), st.sampled_from([F32, F64]))
def test_merge_equals_the_stream_of_the_sum(data: st.DataObject, gap: int, dtype: np.dtype) -> None:
    numel = data.draw(st.sampled_from([5, 40, 2**32 - 1]))
    a, b = data.draw(tensors(numel, dtype)), data.draw(tensors(numel, dtype))
    merged = Stream.from_sparse(a, gap).merge(Stream.from_sparse(b, gap), gap)
    total = {}
    for index in kept(a).keys() | kept(b).keys():
        with np.errstate(over="ignore"):
            total[index] = float(dtype.type(kept(a).get(index, 0)) + dtype.type(kept(b).get(index, 0)))
    assert as_blocks(merged) == oracle.blocks(total, gap)


@quick
@given(st.data(), tensors(numel=300))
def test_split_and_concatenate(data: st.DataObject, tensor: SparseTensor) -> None:
    stream = Stream.from_sparse(tensor, 2)
    cuts = sorted(data.draw(st.lists(st.integers(0, 300), max_size=9)))
    parts = stream.split(np.array(cuts, np.uint64))
    for part, begin, end in zip(parts, [0, *cuts], [*cuts, 300], strict=True):
        out = np.full(end - begin, 7, tensor.values.dtype)
        part.write_dense(begin, out)
        assert np.array_equal(out, tensor.dense()[begin:end])
    joined = Stream.concatenate(parts)
    assert np.array_equal(joined.values, stream.values) and np.array_equal(joined.indices(), stream.indices())


@quick
@given(tensors(), st.sampled_from([PLAIN, CODED, PAIRS]), st.integers(0, 3))
def test_bytes_round_trip(tensor: SparseTensor, form: int, gap: int) -> None:
    stream = Stream.from_pairs(tensor) if form == PAIRS else Stream.from_sparse(tensor, gap)
    section = pack(stream, form)
    assert section.size % 8 == 0
    back = unpack(section, tensor.numel, tensor.values.dtype)
    for name in ("starts", "lengths", "values"):
        assert np.array_equal(getattr(back, name), getattr(stream, name))


@quick
@given(tensors(), st.booleans(), st.sampled_from(VALUES), st.integers(2, 8))
def test_codec_round_trip(tensor: SparseTensor, coded: bool, value: str, bits: int) -> None:
    codec = DenseStream(coded=coded, value=value, bits=bits)
    if value in ("float16", "qsgd"):
        tensor = SparseTensor(tensor.numel, tensor.indices, np.clip(tensor.values, -60000, 60000))
    section, support = codec.encode(tensor.indices, tensor.values, tensor.numel, KEY)
    assert support is not None and np.isin(tensor.indices, support).all()
    again, values = DenseStream.decode(section, tensor.numel, support.size, False, tensor.values.dtype, KEY)
    assert again is not None and np.array_equal(again, support) and values.dtype == tensor.values.dtype
    exact = np.zeros(support.size, np.float64)
    exact[np.searchsorted(support, tensor.indices)] = tensor.values
    largest = np.abs(exact).max(initial=0)
    bound = {
        "raw": 0.0,
        "float16": np.abs(exact) * 2**-11 + 6e-8,
        "bfloat16": np.abs(exact) * 2**-8 + 1e-38,
        "qsgd": largest / (2 ** (bits - 1) - 1) * (1 + 1e-6),
    }[value]
    assert np.all(np.abs(values - exact) <= bound)


@pytest.mark.parametrize("coded", [False, True])
def test_dense_and_empty(coded: bool) -> None:
    codec = DenseStream(coded=coded)
    x = np.linspace(-1, 1, 97, dtype=np.float32)
    section, support = codec.encode(None, x, x.size, KEY)
    assert support is None and section.size < 4 * x.size + HEADER.size + 24
    indices, values = DenseStream.decode(section, x.size, x.size, True, F32, KEY)
    assert indices is None and np.array_equal(values, x)
    section, support = codec.encode(np.empty(0, np.uint32), np.empty(0, np.float32), 10, KEY)
    assert support is not None and support.size == 0
    indices, values = DenseStream.decode(section, 10, 0, False, F32, KEY)
    assert indices is not None and indices.size == values.size == 0


def test_fill_costs_nothing() -> None:
    rng = np.random.default_rng(6)
    residual = rng.standard_normal(20000).astype(np.float32)
    codec = DenseStream(coded=False)
    indices = np.flatnonzero(np.abs(residual) > 1).astype(np.uint32)
    bare, covered = codec.encode(indices, residual[indices], residual.size, KEY)
    filled, support = codec.encode_from(lambda at: residual[at], indices, residual[indices], residual.size, KEY)
    assert support is not None and np.array_equal(support, covered) and support.size > 1.2 * indices.size
    assert filled.size == bare.size
    again, values = DenseStream.decode(filled, residual.size, support.size, False, F32, KEY)
    assert np.array_equal(again, support) and np.array_equal(values, residual[support])
    assert np.array_equal(DenseStream.decode_own(filled, residual.size, support, F32, KEY), values)


@pytest.mark.parametrize("density", [0.01, 0.05, 0.1])
def test_volume_of_coded_blocks(density: float) -> None:
    # The worst case for blocks: random positions without clusters.
    numel = 1_000_000
    tensor = random_tensor(numel, int(density * numel), 7)
    pairs = 8 * tensor.indices.size
    coded = DenseStream().encode(tensor.indices, tensor.values, numel, KEY)[0].size
    assert coded / pairs < 0.75
    plain = DenseStream(coded=False).encode(tensor.indices, tensor.values, numel, KEY)[0].size
    assert plain / pairs > 1.3


def packed(starts: list[int], lengths: list[int], values: int, numel: int = 100) -> np.ndarray:
    stream = Stream(numel, np.array(starts, np.uint32), np.array(lengths, np.uint32), np.ones(values, np.float32))
    return pack(stream, PLAIN)


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        (packed([5, 7], [3, 1], 4), "overlap"),
        (packed([7, 5], [1, 1], 2), "out of order"),
        (packed([98], [3], 3), "leave"),
        (packed([5, 9], [0, 2], 2), "empty"),
        (packed([5, 9], [2, 2], 3), "hold"),
        (packed([5], [2**32 - 1], 2), "leave"),
        (packed([5], [2], 2, numel=101), "101 elements"),
    ],
)
def test_invalid_blocks_are_refused(section: np.ndarray, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        unpack(section, 100, F32)


def test_blocks_outside_their_range_are_refused() -> None:
    with pytest.raises(ValueError, match="leave"):
        unpack(packed([5], [2], 2), 100, F32, None, 6, 50)
    with pytest.raises(ValueError, match="leave"):
        unpack(packed([48], [3], 3), 100, F32, None, 6, 50)
    with pytest.raises(ValueError, match="dtype"):
        unpack(packed([5], [2], 2), 100, F64)
