"""The value codec ``fit_dexp``. test_fit_poly.py has what both fits must do."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hvd_deepreduce.codecs.value.fit_dexp import FitDExp
from tests.oracle import fit_dexp as oracle
from tests.value.quantizers import F32, KEY
from tests.value.test_fit_poly import COARSE, FLOATS, error, fitted, gradient


def encode(values):
    return FitDExp().encode(values, None, KEY)[0]


def rates_of(section):
    b, d = np.frombuffer(section.tobytes(), np.float32)[[5, 7]]
    return float(b), float(d)


@given(st.one_of(arrays(np.float32, st.integers(0, 90), elements=FLOATS), arrays(np.float32, 90, elements=COARSE)))
def test_bytes_equal_the_oracle(values):
    section = encode(values)
    assert section.tobytes() == oracle.encode(values)[0].tobytes()
    decoded = FitDExp.decode(section, values.size, None, F32, KEY)
    np.testing.assert_array_equal(decoded, oracle.decode(section, values.size))


@pytest.mark.parametrize("kept", [8, 368, 5003])
def test_bytes_of_many_values_equal_the_oracle(kept):
    section = encode(gradient(kept))
    assert section.tobytes() == oracle.encode(gradient(kept))[0].tobytes()
    np.testing.assert_array_equal(FitDExp.decode(section, kept, None, F32, KEY), oracle.decode(section, kept))


def test_exponential_equals_numpy_up_to_rounding():
    x = np.concatenate([np.linspace(-708, 709, 100_001), np.linspace(-1, 1, 10_001), [0.0]])
    np.testing.assert_allclose(oracle.exp(x), np.exp(x), rtol=4e-16)


@given(arrays(np.float32, 2, elements=st.floats(0.5, 2, width=32)))
def test_two_values_are_kept(values):
    np.testing.assert_allclose(fitted(FitDExp(), values), values, rtol=1e-5)


CURVES = {
    "two falling": (0.7, -30.0, 0.3, -1.0),
    "far apart": (0.5, -300.0, 0.5, -0.2),
    "close": (2.0, -5.0, -0.9, -6.0),
    "one and a constant": (0.8, -12.0, 0.2, 0.0),
    "falling at the end": (1.0, 0.0, -0.01, 4.0),
    "both fall at the end": (1.0, -0.5, -1e-9, 20.0),
}


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("scale", [1e-37, 1.0, 1e37])
@pytest.mark.parametrize("curve", CURVES)
def test_double_exponential_is_recovered(curve, scale, sign):
    a, b, c, d = CURVES[curve]
    x = np.linspace(0, 1, 20_000)
    y = a * np.exp(b * x) + c * np.exp(d * x)
    assert y.min() > 0 and np.all(np.diff(y) < 0)
    values = (sign * scale * y).astype(np.float32)
    assert error(fitted(FitDExp(), values), values) < 1e-4
    np.testing.assert_allclose(rates_of(encode(values)), sorted((b, d)), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kept", [50, 368, 3000, 20_000])
def test_rates_and_error_equal_least_squares(kept):
    values = np.sort(np.abs(gradient(kept)))[::-1].copy()
    expected = oracle.rates((values / values[0]).astype(np.float64))
    assert all(np.isreal(expected))
    np.testing.assert_allclose(rates_of(encode(values)), expected, rtol=1e-4)
    best = error(oracle.fit(values.astype(np.float64)), values)
    assert error(fitted(FitDExp(), values), values) <= best * (1 + 1e-4) < 0.25


@pytest.mark.parametrize("kept", [8, 368, 20_000])
def test_signs_are_fitted_separately_and_in_the_same_way(kept):
    values = np.unique(np.abs(gradient(kept)))
    kept = values.size
    both = fitted(FitDExp(), np.concatenate([values, -values]))
    np.testing.assert_array_equal(both[:kept], fitted(FitDExp(), values))
    np.testing.assert_array_equal(both[kept:], -both[:kept])
    assert encode(np.concatenate([values, -values])).size == 8 + 2 * 24 and encode(values).size == 8 + 24


def line_error(values):
    x = np.arange(values.size)
    return error(np.polyval(np.polyfit(x, values.astype(np.float64), 1), x), values)


@pytest.mark.parametrize(
    "curve",
    [lambda x: 1 - 0.9 * x, lambda x: 1 - 0.9 * x**2, lambda x: 1.1 + np.cos(3.1 * x), lambda x: (1 - x) ** 3 + 1e-3,
     lambda x: 2.0 - (x > 0.5), lambda x: 1.0 + (x < 1e-3), lambda x: 2.0 - (x > 0.999), lambda x: 1 / (x + 1e-3),
     lambda x: 2 + 1e-6 * (1 - x), lambda x: 1.1 - np.tanh(20 * (x - 0.5))],
)  # fmt: skip
@pytest.mark.parametrize("kept", [3, 4, 5, 30, 3000])
def test_fit_is_at_least_as_good_as_a_straight_line(curve, kept):
    """Also with complex or equal roots and with dependent columns."""
    values = np.sort(curve(np.linspace(0, 1, kept)).astype(np.float32))[::-1].copy()
    assert error(fitted(FitDExp(), values), values) <= line_error(values) * 1.05 + 2e-4


def test_a_million_values():
    x = np.linspace(0, 1, 10**6)
    values = (0.9 * np.exp(-2000 * x) + 0.1 * np.exp(-2 * x)).astype(np.float32)
    assert error(fitted(FitDExp(), values), values) < 1e-4


def side(positives, negatives, *floats):
    return np.concatenate([np.array([positives, negatives], np.uint32).view(np.uint8),
                           np.array(floats, np.float32).view(np.uint8)])  # fmt: skip


@pytest.mark.parametrize(
    ("section", "count"),
    [(side(2, 2), 3), (side(2**32 - 1, 2**32 - 1), 3), (side(3, 0), 3), (side(0, 0, 1, 1, 1, 1, 1, 1), 3),
     (side(3, 0, 2, 1, 1, 1, 1, 1), 3), (side(3, 0, 0, 1, 1, 1, 1, 1), 3), (side(3, 0, 1, np.inf, 1, 1, 1, 1), 3),
     (side(3, 0, np.nan, 1, 1, 1, 1, 1), 3), (side(3, 0, 1, 1, np.nan, 1, 1, 1), 3),
     (side(3, 0, 1, 1, 1, np.inf, 1, 1), 3), (side(0, 3, 1, 1, 1, 1, 1, -np.inf), 3)],
)  # fmt: skip
def test_sections_that_no_encoder_wrote(section, count):
    with pytest.raises(ValueError):
        FitDExp.decode(section, count, None, F32, KEY)


def test_largest_parameters_decode_to_finite_values():
    big = np.finfo(np.float32).max
    for floats in ([big, big, big, big], [big, -big, -big, big], [-big, big, big, -big]):
        assert np.isfinite(FitDExp.decode(side(9, 0, 1e-45, big, *floats), 9, None, F32, KEY)).all()
