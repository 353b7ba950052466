"""The joint codec ``three_lc``."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hvd_deepreduce.codecs.joint.three_lc import ThreeLC
from hvd_deepreduce.config import Config
from hvd_deepreduce.ops import ternary, three_lc
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.wire.standalone import unpack
from tests.oracle import three_lc as oracle
from tests.oracle import trits
from tests.value.quantizers import AWKWARD, F32, KEY, normals, vectors

bytes_with_zeros = st.lists(st.one_of(st.just(121), st.just(121), st.integers(0, 242)), max_size=90)


def dense_trip(values, multiplier=1.0):
    section, support = ThreeLC(multiplier=multiplier).encode(None, values, values.size, KEY)
    assert support is None
    support, decoded = ThreeLC.decode(section, values.size, values.size, True, values.dtype, KEY)
    assert support is None
    assert decoded.size == values.size
    assert np.isfinite(decoded).all()
    return section, decoded


@given(vectors, st.sampled_from([1.0, 1.5, 1.75, 1.999]))
def test_bytes_equal_the_oracle(values, multiplier):
    section, decoded = dense_trip(values, multiplier)
    assert section.tobytes() == oracle.encode(values, multiplier)
    assert np.array_equal(decoded, oracle.decode(section.tobytes(), values.size))


@pytest.mark.parametrize("count", [1, 4, 5, 6, 24_999, 41_000])
def test_bytes_of_many_values_equal_the_oracle(count):
    for values in (normals(count), np.where(np.arange(count) % 97, 0, normals(count)).astype(np.float32)):
        assert dense_trip(values)[0].tobytes() == oracle.encode(values, 1.0)


@pytest.mark.parametrize("multiplier", [1.0, 1.9])
@pytest.mark.parametrize("values", AWKWARD.values(), ids=AWKWARD.keys())
def test_awkward_values(values, multiplier):
    section, decoded = dense_trip(values, multiplier)
    limit = np.finfo(np.float32).max
    x = np.clip(values, -limit, limit).astype(np.float32)
    assert section.tobytes() == oracle.encode(x, multiplier)
    m = section[:4].view(np.float32)[0]
    assert (np.abs(decoded.astype(np.float64) - x) <= m / 2 * (1 + 1e-7)).all()
    assert np.isin(decoded, [-m, 0, m]).all()


def test_a_half_is_rounded_away_from_zero():
    values = np.array([4, 2, -2, 1.9999999, -1.9999999, 0], np.float32)
    assert dense_trip(values)[1].tolist() == [4, 4, -4, 0, 0, 0]
    tiny = np.array([3, 2, 1, -2, -1], np.float32) * np.float32(1e-45)  # M is 3 units; its half is not a float32
    assert (dense_trip(tiny)[1] / np.float32(1e-45)).tolist() == [3, 3, 0, -3, 0]


@given(bytes_with_zeros)
def test_zero_runs_equal_the_oracle(packed):
    data = np.array(packed, np.uint8)
    section = three_lc.zero_runs_encode(data)
    assert section.tobytes() == trits.zero_runs(bytes(packed))
    assert np.array_equal(three_lc.zero_runs_decode(section, data.size), data)


@pytest.mark.parametrize("zeros", range(50))
def test_zero_runs_of_every_length(zeros):
    for head, tail in ((0, 0), (1, 1), (0, 20), (3, 0)):
        packed = bytes([7] * head + [121] * zeros + [200] * tail)
        section = three_lc.zero_runs_encode(np.frombuffer(packed, np.uint8))
        assert section.tobytes() == trits.zero_runs(packed)
        assert three_lc.zero_runs_decode(section, len(packed)).tobytes() == packed


@given(st.lists(st.integers(0, 2), max_size=70))
def test_digits_equal_the_oracle(digits):
    data = np.array(digits, np.uint8)
    packed = ternary.pack(data)
    assert packed.tobytes() == trits.pack(digits)
    assert np.array_equal(ternary.unpack(packed, data.size), data)


@given(vectors, st.sampled_from([np.float32, np.float64]), st.integers(0, 2**32 - 1))
def test_sparse_support_is_the_nonzero_decoded_elements(values, dtype, seed):
    numel = 3 * values.size + 1
    indices = np.sort(np.random.default_rng(seed).choice(numel, values.size, replace=False)).astype(np.uint32)
    values = values.astype(dtype)
    section, support = ThreeLC().encode(indices, values, numel, KEY)
    assert support is not None and support.dtype == np.uint32
    dense = np.zeros(numel, np.float32)
    dense[indices] = values
    expected = oracle.decode(section.tobytes(), numel)
    assert section.tobytes() == oracle.encode(dense, 1.0)
    assert np.array_equal(support, np.flatnonzero(expected))
    again, decoded = ThreeLC.decode(section, numel, support.size, False, values.dtype, KEY)
    assert np.array_equal(again, support)
    assert np.array_equal(decoded, expected[support])


@pytest.mark.parametrize("sparsifier", ["none", "topk", "nonzero"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sent_values_and_residual_sum_to_the_gradient(sparsifier, dtype):
    pipeline = Pipeline(Config.load(sparsifier=sparsifier, joint={"name": "three_lc", "multiplier": 1.5}))
    gradient = normals(30_000).astype(dtype)
    residual, out = np.zeros_like(gradient), np.empty_like(gradient)
    total = np.zeros(gradient.size)
    for step in range(5):
        container = unpack(pipeline.encode(gradient, residual, KEY._replace(step=step)))
        pipeline.decode([container], out)
        total += out
        np.testing.assert_allclose(total + residual, (step + 1.0) * gradient, rtol=1e-5, atol=1e-5)
    assert np.count_nonzero(total) > 0


def test_larger_multiplier_sends_fewer_bytes():
    values = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    sections = [dense_trip(values, s)[0].size for s in (1.0, 1.4, 1.9)]
    assert sections[0] > sections[1] > sections[2]


def test_sizes_are_as_documented():
    assert dense_trip(np.ones(50_000, np.float32))[0].size == 4 + 10_000
    assert dense_trip(np.zeros(70_000, np.float32))[0].size == 4 + 1000  # one byte for 14 bytes of five digits


def test_broken_sections():
    values = normals(2000)
    section, support = ThreeLC().encode(np.arange(2000, dtype=np.uint32), values, 2000, KEY)
    assert support is not None
    for size in range(section.size):
        for dense in (True, False):
            with pytest.raises(ValueError, match=r"\w+ \w+ \w+"):
                ThreeLC.decode(section[:size].copy(), 2000, 2000 if dense else support.size, dense, F32, KEY)
    for numel in (1900, 2100, 2**32 - 1, 0):
        with pytest.raises(ValueError):
            ThreeLC.decode(section, numel, numel, True, F32, KEY)
    for count in (0, support.size - 1, support.size + 1):
        with pytest.raises(ValueError, match="not zero"):
            ThreeLC.decode(section, 2000, count, False, F32, KEY)
    for m in (np.nan, np.inf, -1.0):
        broken = section.copy()
        broken[:4] = np.array([m], np.float32).view(np.uint8)
        with pytest.raises(ValueError, match="out of range"):
            ThreeLC.decode(broken, 2000, 2000, True, F32, KEY)
    random = np.random.default_rng(0)
    for _ in range(400):
        broken = section.copy()
        broken[random.integers(section.size)] ^= np.uint8(1 << random.integers(8))
        try:
            found, decoded = ThreeLC.decode(broken, 2000, support.size, False, F32, KEY)
        except ValueError:
            continue
        assert found is not None and found.size == decoded.size == support.size
        assert np.isfinite(decoded).all()


def test_digits_behind_the_last_must_be_zeros():
    packed = ternary.pack(np.array([2], np.uint8))
    assert packed.tolist() == [2 * 81 + 40]
    for byte in (2 * 81 + 39, 2 * 81 + 41, 243):
        with pytest.raises(ValueError, match="out of range"):
            ternary.unpack(np.array([byte], np.uint8), 1)


def test_settings_out_of_range():
    for wrong in ({"multiplier": 0.9}, {"multiplier": 2.0}, {"bits": 3}):
        with pytest.raises(ValidationError):
            ThreeLC(**wrong)
