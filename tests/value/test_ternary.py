"""The value codec ``ternary``."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.value.ternary import Ternary
from tests.oracle import ternary as oracle
from tests.value.quantizers import AWKWARD, KEY, check_broken, mean_of_draws, normals, round_trip, vectors


def bucket_maxima(values, bucket):
    return np.repeat([np.abs(values[at : at + bucket]).max() for at in range(0, values.size, bucket)], bucket)[
        : values.size
    ]


@given(vectors, st.sampled_from([1, 2, 7, 64, None]), st.sampled_from([None, 1.0, 2.5]))
def test_bytes_are_the_oracles(values, bucket, clip):
    section, decoded = round_trip(Ternary(bucket_size=bucket, clip=clip), values)
    assert section.tobytes() == oracle.encode(values, bucket or max(1, values.size), clip, KEY)
    assert np.array_equal(decoded, oracle.decode(section.tobytes(), values.size))


@pytest.mark.parametrize("clip", [None, 2.5])
@pytest.mark.parametrize("bucket", [512, 1500, None])
def test_bytes_of_many_values_equal_the_oracle(bucket, clip):
    values = normals(4001)
    section, _ = round_trip(Ternary(bucket_size=bucket, clip=clip), values)
    assert section.tobytes() == oracle.encode(values, bucket or 4001, clip, KEY)


@pytest.mark.parametrize("clip", [None, 2.5])
@pytest.mark.parametrize("values", AWKWARD.values(), ids=AWKWARD.keys())
def test_awkward_values(values, clip):
    section, decoded = round_trip(Ternary(clip=clip), values)
    limit = np.finfo(np.float32).max
    x = np.clip(values, -limit, limit).astype(np.float32)
    assert section.tobytes() == oracle.encode(x, 512, clip, KEY)
    # A decoded value is 0 or has the sign of its value, and is not larger than the largest magnitude of its bucket.
    assert (decoded * np.sign(x) >= 0).all()
    if x.size:
        assert (np.abs(decoded) <= bucket_maxima(x, 512)).all()
    if clip is None and x.size:
        assert (decoded[np.abs(x) == bucket_maxima(x, 512)] == x[np.abs(x) == bucket_maxima(x, 512)]).all()


def test_unbiased_with_the_papers_variance():
    values = normals(1500, seed=3)
    draws = 3000
    mean, variance = mean_of_draws(Ternary(bucket_size=100), values, draws)
    m = bucket_maxima(values, 100).astype(np.float64)
    expected = np.abs(values) * (m - np.abs(values))
    deviations = (mean - values) / np.sqrt(expected / draws + 1e-30)
    assert np.abs(deviations).max() < 5
    assert abs(np.mean(deviations)) < 5 / np.sqrt(values.size)
    assert abs(variance.sum() / expected.sum() - 1) < 0.03


def test_clipping_at_standard_deviations():
    values = np.random.default_rng(0).standard_normal(20_000).astype(np.float32)
    values[5] = 100
    _, decoded = round_trip(Ternary(bucket_size=None, clip=2.5), values)
    assert decoded[5] == pytest.approx(2.5 * np.sqrt(np.mean(values.astype(np.float64) ** 2)), rel=1e-6)
    plain = np.linalg.norm(round_trip(Ternary(bucket_size=None), values)[1] - values)
    assert np.linalg.norm(decoded - values) < plain


def test_ranks_and_steps_round_independently():
    values = normals(1000)
    keys = ((1, 2, 3, 0), (1, 2, 3, 1), (1, 2, 4, 0))
    sections = {round_trip(Ternary(), values, RngKey(*key))[0].tobytes() for key in keys}
    assert len(sections) == 3


def test_size_is_as_documented():
    assert round_trip(Ternary(bucket_size=512), normals(51200))[0].size == 8 + 4 * 100 + 10240
    assert round_trip(Ternary(bucket_size=None), normals(51200))[0].size == 8 + 4 + 10240


def test_broken_sections():
    assert check_broken(Ternary(bucket_size=64), normals(500)) > 30


def test_settings_are_checked():
    for wrong in ({"bucket_size": 0}, {"bucket_size": 2**31 + 1}, {"clip": 0.5}, {"bits": 2}):
        with pytest.raises(ValidationError):
            Ternary(**wrong)
