"""Means, variances and losses of natural, sign and ternary. test_oracles.py compares their bytes with the oracle's."""

import numpy as np
import pytest

from hvd_deepreduce.codecs.value.natural import Natural
from hvd_deepreduce.codecs.value.sign import Sign
from hvd_deepreduce.codecs.value.ternary import Ternary
from tests.oracle import sign as oracle
from tests.value.quantizers import KEY, mean_of_draws, normals, round_trip


def test_natural_is_unbiased_with_variance_of_at_most_an_eighth_of_the_square():
    values = np.concatenate([normals(1500, seed=7), 1.5 * np.ldexp(1.0, np.arange(-60, 60)).astype(np.float32)])
    draws = 3000
    mean, variance = mean_of_draws(Natural(), values, draws)
    x = values.astype(np.float64)
    below = np.exp2(np.floor(np.log2(np.abs(x))))
    expected = (np.abs(x) - below) * (2 * below - np.abs(x))
    assert (expected <= x**2 / 8 * (1 + 1e-12)).all()
    assert (np.abs(mean - x) <= 5 * np.sqrt(expected / draws) + 1e-3 * below).all()
    assert abs(np.mean((mean - x) / below)) < 5 * 0.5 / np.sqrt(draws * x.size)
    assert abs(np.sum(variance / x**2) / np.sum(expected / x**2) - 1) < 0.02
    assert (variance <= x**2 / 8 * 1.2).all()


def test_denormals_are_unbiased():
    values = (np.arange(1, 400) * 2.0**-135).astype(np.float32)
    draws = 3000
    mean, _ = mean_of_draws(Natural(), values, draws)
    share = values.astype(np.float64) * 2.0**126
    assert (np.abs(mean * 2.0**126 - share) <= 5 * np.sqrt(share * (1 - share) / draws) + 1e-3).all()


def test_an_exponent_of_infinity_is_refused():
    section, _ = Natural().encode(normals(501), None, KEY)
    section[63] = 255  # the first exponent: 501 signs take 63 bytes
    with pytest.raises(ValueError, match="out of range"):
        Natural.decode(section, 501, None, np.dtype(np.float32), KEY)


@pytest.mark.parametrize("count", [1023, 1024, 1025, 2048, 40_000, 1024 * 1024 + 5])
def test_sums_are_taken_in_the_documented_order(count):
    # Magnitudes from 1e-12 to 1e12, so that another order gives another sum.
    random = np.random.default_rng(count)
    values = (random.standard_normal(count) * 10.0 ** random.uniform(-12, 12, count)).astype(np.float32)
    for bucket in (None, 1500) if count < 100_000 else (None,):
        assert round_trip(Sign(bucket_size=bucket), values)[0].tobytes() == oracle.encode(values, bucket)


@pytest.mark.parametrize("bucket", [64, None])
def test_loss_of_sign_equals_the_documented_share(bucket):
    values = normals(6400)
    _, decoded = round_trip(Sign(bucket_size=bucket), values)
    for at in range(0, values.size, bucket or values.size):
        v = values[at : at + (bucket or values.size)].astype(np.float64)
        lost = np.sum((v - decoded[at : at + v.size]) ** 2)
        share = 1 - np.abs(v).sum() ** 2 / (v.size * np.sum(v**2))
        assert lost == pytest.approx(share * np.sum(v**2), rel=1e-5)
        assert share < 1


def test_ternary_is_unbiased_with_the_papers_variance():
    values = normals(1500, seed=3)
    draws = 3000
    mean, variance = mean_of_draws(Ternary(bucket_size=100), values, draws)
    m = np.repeat(np.abs(values).reshape(-1, 100).max(1), 100).astype(np.float64)
    expected = np.abs(values) * (m - np.abs(values))
    deviations = (mean - values) / np.sqrt(expected / draws + 1e-30)
    assert np.abs(deviations).max() < 5
    assert abs(np.mean(deviations)) < 5 / np.sqrt(values.size)
    assert abs(variance.sum() / expected.sum() - 1) < 0.03
