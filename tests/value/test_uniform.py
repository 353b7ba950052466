"""The value codec ``uniform``."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hvd_deepreduce.value.uniform import Uniform
from tests.oracle import uniform as oracle
from tests.value.quantizers import AWKWARD, KEY, check_broken, mean_of_draws, normals, round_trip, vectors


def steps_of(values, bits, bucket):
    ranges = [np.ptp(values[at : at + bucket].astype(np.float64)) for at in range(0, values.size, bucket)]
    return np.repeat(ranges, bucket)[: values.size] / (2**bits - 1)


@given(vectors, st.sampled_from([1, 2, 7, 64, 512]), st.sampled_from([8, 16]))
def test_bytes_are_the_oracles(values, bucket, bits):
    section, decoded = round_trip(Uniform(bits=bits, bucket_size=bucket), values)
    assert section.tobytes() == oracle.encode(values, bits, bucket, KEY)
    assert np.array_equal(decoded, oracle.decode(section.tobytes(), values.size))


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("values", AWKWARD.values(), ids=AWKWARD.keys())
def test_awkward_values(values, bits):
    section, decoded = round_trip(Uniform(bits=bits), values)
    limit = np.finfo(np.float32).max
    x = np.clip(values, -limit, limit).astype(np.float32)
    assert section.tobytes() == oracle.encode(x, bits, 512, KEY)
    # The error is less than a level, plus the rounding of the result to float32.
    error = np.abs(decoded.astype(np.float64) - x)
    assert (error <= steps_of(x, bits, 512) * (1 + 1e-9) + np.abs(x) * 2**-23).all()


def test_equal_values_are_exact():
    values = np.full(1000, -0.1, np.float32)
    assert np.array_equal(round_trip(Uniform(), values)[1], values)


@pytest.mark.parametrize("bits", [8, 16])
def test_unbiased_with_variance_of_at_most_a_quarter_of_a_squared_level(bits):
    values = normals(1500, seed=5)
    draws = 2000
    mean, variance = mean_of_draws(Uniform(bits=bits, bucket_size=100), values, draws)
    step = steps_of(values, bits, 100)
    # The result is also rounded to float32.
    noise = np.abs(values) * 2.0**-24
    assert (np.abs(mean - values) <= 5 * step / 2 / np.sqrt(draws) + noise).all()
    assert abs(np.mean((mean - values) / step)) < 5 / 2 / np.sqrt(draws * values.size) + np.mean(noise / step)
    assert (variance <= (step + noise) ** 2 / 4 * (1 + 6 / np.sqrt(draws))).all()
    assert variance.sum() >= (step**2).sum() / 8  # one sixth on average


def test_16_bits_lose_less_than_8():
    values = normals(5000)
    errors = [np.linalg.norm(round_trip(Uniform(bits=bits), values)[1] - values) for bits in (8, 16)]
    assert errors[1] < errors[0] / 200


def test_size_is_as_documented():
    assert round_trip(Uniform(bits=8, bucket_size=512), normals(5120))[0].size == 8 + 80 + 5120
    assert round_trip(Uniform(bits=16, bucket_size=512), normals(5120))[0].size == 8 + 80 + 10240


@pytest.mark.parametrize("bits", [8, 16])
def test_broken_sections(bits):
    assert check_broken(Uniform(bits=bits, bucket_size=64), normals(500)) > 30


@pytest.mark.parametrize("low, high", [(1.0, 0.0), (np.nan, 1.0), (0.0, np.inf), (-np.inf, 0.0)])
def test_impossible_ranges_are_refused(low, high):
    section, _ = Uniform().encode(normals(100), None, KEY)
    section[8:16] = np.array([low, high], np.float32).view(np.uint8)
    with pytest.raises(ValueError, match="out of range"):
        Uniform.decode(section, 100, None, np.dtype(np.float32), KEY)


def test_settings_are_checked():
    for wrong in ({"bits": 7}, {"bucket_size": 0}, {"bucket_size": None}):
        with pytest.raises(ValidationError):
            Uniform(**wrong)
