"""The value codec ``fit_poly``, and what ``fit_dexp`` has in common with it."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hvd_deepreduce.codecs.value.fit_dexp import FitDExp
from hvd_deepreduce.codecs.value.fit_poly import FitPoly
from hvd_deepreduce.config import Config
from hvd_deepreduce.ops import sort
from hvd_deepreduce.pipeline import Pipeline
from tests import cases
from tests.oracle import fit_poly as oracle
from tests.value.quantizers import F32, KEY, clipped

FLOATS = st.floats(allow_nan=False, allow_infinity=False, width=32)
# Few distinct values: ties, short segments and straight lines.
COARSE = st.integers(-4, 4).map(float)


def gradient(kept, seed=0):
    """The top 1% of products of a normal and a lognormal variate."""
    rng = np.random.default_rng(seed)
    dense = (1e-3 * rng.standard_normal(100 * kept) * np.exp(rng.standard_normal(100 * kept))).astype(np.float32)
    return np.ascontiguousarray(dense[np.argsort(-np.abs(dense))[:kept]][rng.permutation(kept)])


def fitted(codec, values):
    """The values that a receiver decodes, in the order of ``values``."""
    section, order = codec.encode(values, None, KEY)
    assert sorted(order) == list(range(values.size))
    decoded = codec.decode(section, values.size, None, values.dtype, KEY)
    assert decoded.dtype == np.float32 and decoded.size == values.size
    out = np.empty_like(decoded)
    out[order] = decoded
    return out


def error(found, values):
    values = values.astype(np.float64)
    return np.linalg.norm(found - values) / np.linalg.norm(values)


def check(values, degree, segments):
    section, order = FitPoly(degree=degree, segments=segments).encode(values, None, KEY)
    expected, expected_order = oracle.encode(values, degree, segments)
    np.testing.assert_array_equal(order, expected_order)
    assert section.tobytes() == expected.tobytes()
    decoded = FitPoly.decode(section, values.size, None, F32, KEY)
    np.testing.assert_array_equal(decoded, oracle.decode(section, values.size))


@given(
    st.one_of(arrays(np.float32, st.integers(0, 90), elements=FLOATS), arrays(np.float32, 90, elements=COARSE)),
    st.integers(0, 15), st.one_of(st.none(), st.integers(1, 20)),
)  # fmt: skip
def test_bytes_equal_the_oracle(values, degree, segments):
    check(values, degree, segments)


@pytest.mark.parametrize(("degree", "segments"), [(5, 4), (5, None), (0, 30), (1, 8), (9, 3)])
@pytest.mark.parametrize("kept", [368, 3001])
def test_bytes_of_many_values_equal_the_oracle(kept, degree, segments):
    check(gradient(kept), degree, segments)


@pytest.mark.parametrize("count", [0, 1, 2, 255, 2047, 2048, 50_001])
def test_sort(count):
    rng = np.random.default_rng(count)
    values = rng.choice(np.array([0.0, -0.0, 1e-45, -1e-45, 3e38, -3e38, 1.5, 1.5000001, -7], np.float32), count)
    values[: count // 2] *= rng.uniform(-1, 1, count // 2).astype(np.float32)
    ordered, order = sort.by_value(values)
    expected, expected_order = oracle.sort(values)
    np.testing.assert_array_equal(order, expected_order)
    np.testing.assert_array_equal(ordered, expected)


@pytest.mark.parametrize("codec", [FitPoly(), FitPoly(degree=0), FitPoly(degree=15, segments=1024),
                                   FitPoly(degree=1, segments=None), FitDExp()])  # fmt: skip
@pytest.mark.parametrize("name", cases.inputs())
def test_sign_and_range_are_kept(name, codec):
    values, found = clipped(cases.inputs()[name]), fitted(codec, cases.inputs()[name])
    np.testing.assert_array_equal(np.sign(found), np.sign(values))
    for sign in (1, -1):
        side, got = np.abs(values[values * sign > 0]), np.abs(found[values * sign > 0])
        assert not side.size or (got.min() >= side.min() and got.max() <= side.max())


@pytest.mark.parametrize("codec", [FitPoly(), FitDExp()])
@pytest.mark.parametrize("name", ["one", "one_zero", "two", "all_zero", "all_equal", "mostly_zero"])
def test_flat_curves_are_exact(name, codec):
    values = cases.inputs()[name]
    np.testing.assert_array_equal(fitted(codec, values), values)


@given(arrays(np.float32, st.integers(1, 6), elements=st.floats(0.5, 2, width=32)))
def test_no_more_values_than_coefficients_are_exact(values):
    np.testing.assert_allclose(fitted(FitPoly(), values), values, rtol=1e-5)


@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1.0, 1e33])
@pytest.mark.parametrize(("degree", "segments"), [(0, 8), (1, 1), (3, 4), (5, 4), (8, 4), (15, 2)])
def test_error_equals_least_squares(degree, segments, scale):
    values = (gradient(2000) * np.float32(1e3) * np.float32(scale)).astype(np.float32)
    best = error(oracle.least_squares(values, degree, segments), values)
    found = error(fitted(FitPoly(degree=degree, segments=segments), values), values)
    rounding = 1e-6 + 1e-45 * np.sqrt(values.size) / np.linalg.norm(values.astype(np.float64))
    assert found <= best * (1 + 1e-4) + rounding


def test_more_segments_and_higher_degrees_lose_less():
    values = gradient(20_000)
    by_segments = [error(fitted(FitPoly(segments=n), values), values) for n in (1, 2, 4, 8, 16)]
    assert all(b < a for a, b in zip(by_segments, by_segments[1:], strict=False)) and by_segments[2] < 0.02
    by_degree = [error(fitted(FitPoly(degree=n), values), values) for n in (0, 1, 3, 5)]
    assert all(b < a for a, b in zip(by_degree, by_degree[1:], strict=False))


CURVES = {
    "exponential": lambda x: np.exp(-7 * x),
    "power": lambda x: 1 / (1 + 30 * x),
    "parabola": lambda x: 2 - x * x,
    "normal": lambda x: np.exp(-3 * x * x) + 0.1,
}


def words(section):
    return np.frombuffer(section.tobytes(), np.uint32)


@pytest.mark.parametrize("curve", ["exponential", "power"])
def test_knot_minimizes_the_area(curve):
    """Lemma 10 of the appendix: for a convex curve, the knot minimizes the area between the curve and two chords."""
    y = CURVES[curve](np.linspace(0, 1, 500)).astype(np.float32)
    section, _ = FitPoly(degree=1, segments=2).encode(y, None, KEY)
    x = np.arange(500)
    areas = [np.trapezoid(np.interp(x, [0, k, 499], y[[0, k, 499]]) - y) for k in range(2, 499)]
    assert words(section)[6] == 2 + np.argmin(areas)


def variation_of_slope(y):
    """M of lemma 12, of a curve on [1, d] that is straight between its points."""
    return np.abs(np.diff(y.astype(np.float64), 2)).sum()


@pytest.mark.parametrize("knots", [1, 2, 3, 5, 8, 13, 21])
@pytest.mark.parametrize("curve", CURVES)
def test_error_of_a_piecewise_linear_fit(curve, knots):
    """Lemma 12 of the appendix (1 in the paper) with the factor that its proof drops: 2 (d - 1) M / p^2."""
    y = CURVES[curve](np.linspace(0, 1, 4000)).astype(np.float32)
    exact = CURVES[curve](np.linspace(0, 1, 4000))
    found = fitted(FitPoly(degree=1, segments=knots + 1), y)
    assert np.abs(found - y).max() <= 2 * 3999 * variation_of_slope(exact) / knots**2


def test_lemma_12_and_remark_5_are_false_as_printed():
    """They claim 2 M / p^2 and 2 sqrt(d) M / p^2. A parabola whose slope goes from -1 to 0 in d = 1,000 points: of its
    p + 1 = 8 pieces one has 125 points or more, and no line is near them."""
    d, p = 1000, 7
    y = np.arange(d, dtype=np.float64)[::-1] ** 2 / (2 * (d - 1)) + 2
    variation = variation_of_slope(y)
    assert variation == pytest.approx(1, abs=2e-3)
    t = np.arange(d // (p + 1))
    piece = y[t]
    from_chord = np.interp(t, t[[0, -1]], piece[[0, -1]]) - piece
    least = from_chord.max() / 2  # of a convex curve, the best line is parallel to the chord
    least_norm = np.linalg.norm(np.polynomial.Polynomial.fit(t, piece, 1)(t) - piece)
    assert f"{2 * variation / p**2:.3f}" == "0.041" and f"{least:.2f}" == "0.96"
    assert least_norm > 5 * 2 * np.sqrt(d) * variation / p**2
    found = np.abs(fitted(FitPoly(degree=1, segments=p + 1), y.astype(np.float32)) - y).max()
    assert least < found <= 2 * (d - 1) * variation / p**2


def spline_of_lemma_12(y, knots):
    """The proof's: constants near the slope at equal shares of its variation, which begin anew on the curve at equal
    shares of what they miss."""
    pieces, slope = knots // 2 + 1, np.diff(y)
    variation = np.append(0, np.abs(np.diff(slope)).cumsum())
    piece = np.minimum(variation * pieces / variation[-1], pieces - 1).astype(int)
    constants = np.array([(part.min() + part.max()) / 2 if part.size else 0
                          for part in (slope[piece == at] for at in range(pieces))])[piece]  # fmt: skip
    missed = np.append(0, np.abs(slope - constants).cumsum())
    part = np.minimum(missed * pieces / max(missed[-1], 1e-300), pieces - 1).astype(int)
    begin = np.searchsorted(part, part)
    run = np.append(0, constants.cumsum())
    return y[begin] + run - run[begin]


@given(arrays(np.float64, st.integers(3, 60), elements=st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0]))),
       st.integers(1, 12))  # fmt: skip
def test_the_spline_of_lemma_12_has_the_corrected_bound(falls, knots):
    y = falls.sum() - np.append(0, falls.cumsum())
    variation = variation_of_slope(y)
    if variation > 1e-6:
        bound = 2 * (y.size - 1) * variation / knots**2
        assert np.abs(spline_of_lemma_12(y, knots) - y).max() <= bound + 1e-9


@pytest.mark.parametrize("degree", [0, 1, 5])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 7.0, 30.0, 1e4])
def test_heuristic_number_of_segments(scale, degree):
    y = (scale * np.exp(-np.arange(3000) / 9.0) + scale).astype(np.float32)
    section, _ = FitPoly(degree=degree, segments=None).encode(y, None, KEY)
    wanted = oracle.heuristic(y.astype(np.float64), degree)
    assert words(section)[3] == len(oracle.knots(y.astype(np.float64), wanted, degree + 1))
    if scale in (7, 30):
        assert words(section)[3] == wanted == {7: (1, 3), 30: (3, 5)}[scale][min(degree, 1)]


def poly(degree, positives, negatives, *sides):
    parts = [np.array([degree, positives, negatives], np.uint32)]
    for segments, least, largest, knots, coefficients in sides:
        parts += [np.array([segments], np.uint32), np.array([least, largest], np.float32).view(np.uint32)]
        parts += [np.array(knots, np.uint32), np.array(coefficients, np.float32).view(np.uint32)]
    return np.concatenate(parts).view(np.uint8)


@pytest.mark.parametrize(
    ("section", "count"),
    [(poly(16, 0, 0), 0), (poly(0, 2, 2), 3), (poly(0, 2**32 - 1, 2**32 - 1), 3),
     (poly(0, 3, 0, (0, 1, 1, [], [])), 3), (poly(0, 3, 0, (4, 1, 1, [1, 2, 3], [1, 1, 1, 1])), 3),
     (poly(0, 3, 0, (2**32 - 1, 1, 1, [], [])), 3), (poly(0, 3, 0, (2, 1, 1, [0], [1, 1])), 3),
     (poly(0, 3, 0, (2, 1, 1, [3], [1, 1])), 3), (poly(0, 3, 0, (2, 1, 1, [2**32 - 1], [1, 1])), 3),
     (poly(0, 3, 0, (3, 1, 1, [2, 1], [1, 1, 1])), 3), (poly(0, 3, 0, (1, 2, 1, [], [1])), 3),
     (poly(0, 3, 0, (1, 0, 1, [], [1])), 3), (poly(0, 3, 0, (1, 1, np.inf, [], [1])), 3),
     (poly(0, 3, 0, (1, np.nan, 1, [], [1])), 3), (poly(0, 3, 0, (1, 1, 1, [], [np.nan])), 3),
     (poly(0, 3, 0, (1, 1, 1, [], [np.inf])), 3)],
)  # fmt: skip
def test_sections_that_no_encoder_wrote(section, count):
    with pytest.raises(ValueError):
        FitPoly.decode(section, count, None, F32, KEY)


def test_largest_coefficients_decode_to_finite_values():
    big = np.finfo(np.float32).max
    section = poly(3, 9, 0, (1, 1e-45, big, [], [big, -big, big, -big]))
    assert np.isfinite(FitPoly.decode(section, 9, None, F32, KEY)).all()


WIDTHS = [3, *[16] * 7, *[32] * 6, *[64] * 6]
RESNET_20 = [n for inputs, outputs in pairwise(WIDTHS) for n in (9 * inputs * outputs, outputs, outputs)] + [640, 10]
"""Elements of each parameter of ResNet-20 for CIFAR-10, 269,722 in all: convolutions, scales and shifts; last layer."""


@pytest.mark.parametrize(
    ("sizes", "density", "volumes"),
    [
        # The layer of DeepReduce's Figure 10; its Figure 8, where Fit-Poly takes 40% and Fit-DExp 50% off Top-r.
        ([36_864], 0.01, {"topk_raw": 0.0200, "dr_fit_poly": 0.0118, "dr_fit_dexp": 0.0104}),
        (RESNET_20, 0.01, {"topk_raw": 0.0206, "dr_fit_poly": 0.0150, "dr_fit_dexp": 0.0127}),
        # The perceptron of docs/results/schemes.md. The appendix's Tables 4 and 5: 0.2033, 0.1039; 0.2069, 0.1087.
        ([50_890], 0.1, {"topk_raw": 0.2001, "dr_fit_poly": 0.1013, "dr_fit_dexp": 0.1003}),
    ],
    ids=["layer", "resnet-20", "perceptron"],
)
def test_the_volumes_of_the_published_form(sizes, density, volumes):
    """Of messages with keys of 32 bits, relative to float32 of all elements, as docs/papers.md has them. They hardly
    depend on the values."""
    for preset, volume in volumes.items():
        pipeline = Pipeline(Config.load(preset, density=density))
        sent = [pipeline.encode(cases.random(n, seed=n), None, KEY, version=2).size for n in sizes]
        assert sum(sent) / (4 * sum(sizes)) == pytest.approx(volume, abs=1e-4), preset
