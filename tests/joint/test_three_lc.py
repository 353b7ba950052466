"""The joint codec ``three_lc``. tests/value/test_oracles.py compares its bytes of dense tensors with the oracle's."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_deepreduce.codecs.joint.three_lc import ThreeLC
from hvd_deepreduce.ops import ternary, three_lc
from tests.oracle import three_lc as oracle
from tests.oracle import trits
from tests.value.quantizers import F32, KEY, normals, round_trip, vectors

bytes_with_zeros = st.lists(st.one_of(st.just(121), st.just(121), st.integers(0, 242)), max_size=90)


@pytest.mark.parametrize("count", [1, 4, 5, 6, 24_999, 41_000])
def test_bytes_of_many_values_equal_the_oracle(count):
    for values in (normals(count), np.where(np.arange(count) % 97, 0, normals(count)).astype(np.float32)):
        assert round_trip(ThreeLC(), values)[0].tobytes() == oracle.encode(values, 1.0)


def test_a_half_is_rounded_away_from_zero():
    values = np.array([4, 2, -2, 1.9999999, -1.9999999, 0], np.float32)
    assert round_trip(ThreeLC(), values)[1].tolist() == [4, 4, -4, 0, 0, 0]
    tiny = np.array([3, 2, 1, -2, -1], np.float32) * np.float32(1e-45)  # M is 3 units; its half is not a float32
    assert (round_trip(ThreeLC(), tiny)[1] / np.float32(1e-45)).tolist() == [3, 3, 0, -3, 0]


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


def test_counts_and_scales_that_no_encoder_wrote():
    section, support = ThreeLC().encode(np.arange(2000, dtype=np.uint32), normals(2000), 2000, KEY)
    assert support is not None
    for numel in (1900, 2100, 2**32 - 1, 0):
        with pytest.raises(ValueError):
            ThreeLC.decode(section, numel, numel, True, F32, KEY)
    for count in (0, support.size - 1, support.size + 1):
        with pytest.raises(ValueError, match="not zero"):
            ThreeLC.decode(section, 2000, count, False, F32, KEY)
    for m in (np.nan, np.inf, -1.0):
        section[:4] = np.array([m], np.float32).view(np.uint8)
        with pytest.raises(ValueError, match="out of range"):
            ThreeLC.decode(section, 2000, 2000, True, F32, KEY)


def test_digits_behind_the_last_must_be_zeros():
    packed = ternary.pack(np.array([2], np.uint8))
    assert packed.tolist() == [2 * 81 + 40]
    for byte in (2 * 81 + 39, 2 * 81 + 41, 243):
        with pytest.raises(ValueError, match="out of range"):
            ternary.unpack(np.array([byte], np.uint8), 1)
