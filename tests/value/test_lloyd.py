"""The value codec ``quantile`` with the splits of least squared error."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from pydantic import ValidationError

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.value.quantile import Quantile
from tests.oracle import lloyd as oracle

KEY = RngKey(1, 2, 3)
few_floats = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1.0000001, 1.1, -2.5, 2.5, 3e38, -1e-45, 1e-38, 1e-45, -7.0])
any_floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


def round_trip(values, **config):
    codec = Quantile(splits="lloyd", **config)
    section, _ = codec.encode(values, None, KEY)
    decoded = codec.decode(section, values.size, None, values.dtype, KEY)
    assert decoded.dtype == np.float32 and decoded.size == values.size and np.isfinite(decoded).all()
    return section, decoded


def tail(count, seed=0, share=0.015625):
    """The largest of normal values, as top-k sends them."""
    x = np.random.default_rng(seed).standard_normal(int(count / share)).astype(np.float32)
    return x[np.argpartition(np.abs(x), -count)[-count:]]


@settings(max_examples=80, derandomize=True, deadline=None)
@given(
    arrays(np.float32, st.integers(0, 60), elements=st.one_of(few_floats, any_floats)),
    st.sampled_from([2, 3, 4, 8, 64]),
)
def test_bytes_equal_the_oracle(values, buckets):
    section, decoded = round_trip(values, buckets=buckets)
    assert section.tobytes() == oracle.encode(values, buckets)
    assert not (decoded * np.sign(values) < 0).any()


@pytest.mark.parametrize("buckets", [2, 4, 16])
@pytest.mark.parametrize("seed", range(3))
def test_bytes_equal_the_oracle_on_many_values(buckets, seed):
    rng = np.random.default_rng(seed)
    for values in (tail(700, seed), (rng.standard_normal(600) * rng.lognormal(size=600)).astype(np.float32)):
        assert round_trip(values, buckets=buckets)[0].tobytes() == oracle.encode(values, buckets)


def least_error(magnitudes):
    """The least squared error of two buckets, tried at every place."""
    x = np.sort(magnitudes.astype(np.float64))
    sums, squares = np.cumsum(x), np.cumsum(x * x)
    n = np.arange(1, x.size)
    return np.min(
        squares[n - 1] - sums[n - 1] ** 2 / n
        + (squares[-1] - squares[n - 1]) - (sums[-1] - sums[n - 1]) ** 2 / (x.size - n)
    )  # fmt: skip


@pytest.mark.parametrize("heavy", [False, True])
def test_two_bits_have_nearly_the_least_squared_error(heavy):
    values = tail(20_000)
    if heavy:
        values *= np.random.default_rng(1).lognormal(size=values.size).astype(np.float32)
    _, decoded = round_trip(values, buckets=4)
    least = least_error(values[values > 0]) + least_error(-values[values < 0])
    error = float(np.sum((values.astype(np.float64) - decoded) ** 2))
    assert least <= error * (1 + 1e-9) and error < 1.01 * least
    halves = Quantile(buckets=4)
    equal = halves.decode(halves.encode(values, None, KEY)[0], values.size, None, values.dtype, KEY)
    assert error < 0.8 * float(np.sum((values.astype(np.float64) - equal) ** 2))


def test_an_entropy_coder_saves_bytes():
    values = tail(50_000)
    plain, coded = (round_trip(values, buckets=4, entropy=entropy)[0].size for entropy in ("none", "rans"))
    assert coded < 0.94 * plain


def test_equal_values_are_exact():
    values = np.tile(np.float32([0.1, -0.3, 0.1, 77.7]), 100)
    np.testing.assert_array_equal(round_trip(values, buckets=4)[1], values)


@pytest.mark.parametrize("idle", [{"center": "middle"}, {"separate_signs": False}])
def test_settings_without_effect_are_refused(idle):
    with pytest.raises(ValidationError, match="value.splits is 'lloyd'"):
        Quantile(splits="lloyd", **idle)
