"""The value codec ``natural``."""

import numpy as np
import pytest
from hypothesis import given

from hvd_deepreduce.codecs.value.natural import Natural
from tests.oracle import natural as oracle
from tests.value.quantizers import AWKWARD, KEY, check_broken, mean_of_draws, normals, round_trip, vectors


@given(vectors)
def test_bytes_equal_the_oracle(values):
    section, decoded = round_trip(Natural(), values)
    assert section.tobytes() == oracle.encode(values, KEY)
    assert np.array_equal(decoded, oracle.decode(section.tobytes(), values.size))


@pytest.mark.parametrize("values", AWKWARD.values(), ids=AWKWARD.keys())
def test_awkward_values(values):
    section, decoded = round_trip(Natural(), values)
    limit = np.finfo(np.float32).max
    x = np.clip(values, -limit, limit).astype(np.float32)
    assert section.tobytes() == oracle.encode(x, KEY)
    normal = np.abs(x) >= np.finfo(np.float32).tiny
    ratio = decoded[normal].astype(np.float64) / x[normal]
    assert ((ratio > 0.5 - 1e-12) & (ratio < 2)).all()
    assert (decoded[x == 0] == 0).all()
    assert np.isin(np.abs(decoded[~normal]), [0, np.finfo(np.float32).tiny]).all()


def test_powers_of_two_are_exact():
    values = np.ldexp(1.0, np.arange(-126, 128)).astype(np.float32)
    values = np.concatenate([values, -values, [0]]).astype(np.float32)
    assert np.array_equal(round_trip(Natural(), values)[1], values)


def test_unbiased_with_variance_of_at_most_an_eighth_of_the_square():
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


def test_top_binade_rounds_down_to_its_power_of_two():
    values = np.array([2.0**127, 3e38, -3.4028235e38], np.float32)
    assert np.array_equal(round_trip(Natural(), values)[1], np.array([2.0**127, 2.0**127, -(2.0**127)], np.float32))


def test_size_is_as_documented():
    assert round_trip(Natural(), normals(8000))[0].size == 9000


def test_broken_sections():
    section, _ = Natural().encode(normals(501), None, KEY)
    with pytest.raises(ValueError, match="out of range"):
        Natural.decode(np.where(np.arange(section.size) == 63, 255, section).astype(np.uint8), 501, None,
                       np.dtype(np.float32), KEY)  # fmt: skip
    check_broken(Natural(), normals(501))
