"""Curves through sorted values, on the host and on a GPU."""

import numpy as np
import pytest

from hvd_deepreduce.ops import curve_fit, sort
from tests import cases
from tests.ops.compare import VALUES, both, broken


@pytest.mark.parametrize("name", VALUES)
def test_fit_poly(gpu, name):
    ordered, _ = sort.by_value(VALUES[name])
    for degree, segments in ((0, None), (5, None), (1, 40), (3, 7), (15, 2)):
        section = both(gpu, curve_fit.fit_poly_encode, ordered, degree, segments)
        both(gpu, curve_fit.fit_poly_decode, section, ordered.size)
    for other in broken(section):
        both(gpu, curve_fit.fit_poly_decode, other, ordered.size)


def test_fit_poly_with_many_segments(gpu):
    ordered, _ = sort.by_value(cases.random(9000) ** 3)
    both(gpu, curve_fit.fit_poly_decode, both(gpu, curve_fit.fit_poly_encode, ordered, 1, 600), 9000)
    wide, _ = sort.by_value(cases.random(3000) * np.float32(1e30))  # the heuristic wants more than there can be
    both(gpu, curve_fit.fit_poly_encode, wide, 2, None)


@pytest.mark.parametrize("degree, segments", [(5, 4), (1, None), (2, 1), (0, 30)])
def test_fit_poly_of_many_values(gpu, degree, segments):
    """The first segments are found by the whole device."""
    steps = np.repeat(np.float32([9, 4, 4, 0, -1, -2, -7]), [2500, 300, 900, 700, 3000, 5, 1795])  # equal distances
    for x in (cases.random(9200), np.abs(cases.random(8200)) ** 3, steps):
        ordered, _ = sort.by_value(x)
        both(gpu, curve_fit.fit_poly_encode, ordered, degree, segments)


@pytest.mark.parametrize("name", VALUES)
def test_fit_dexp(gpu, name):
    for x in (VALUES[name], np.abs(VALUES[name]), -np.exp(np.linspace(-9, 3, 700)).astype(np.float32)):
        ordered, _ = sort.by_value(x)
        section = both(gpu, curve_fit.fit_dexp_encode, ordered)
        both(gpu, curve_fit.fit_dexp_decode, section, ordered.size)
    for other in broken(section):
        both(gpu, curve_fit.fit_dexp_decode, other, ordered.size)
