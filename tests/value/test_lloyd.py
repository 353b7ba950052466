"""The value codec ``quantile`` with the splits of least squared error. test_oracles.py compares its bytes with the
oracle's."""

import numpy as np
import pytest

from hvd_deepreduce.codecs.value.quantile import Quantile
from tests.value.quantizers import round_trip


def tail(count, seed=0, share=0.015625):
    """The largest of normal values, as top-k sends them."""
    x = np.random.default_rng(seed).standard_normal(int(count / share)).astype(np.float32)
    return x[np.argpartition(np.abs(x), -count)[-count:]]


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
    _, decoded = round_trip(Quantile(splits="lloyd", buckets=4), values)
    least = least_error(values[values > 0]) + least_error(-values[values < 0])
    error = float(np.sum((values.astype(np.float64) - decoded) ** 2))
    assert least <= error * (1 + 1e-9) and error < 1.01 * least
    equal = round_trip(Quantile(buckets=4), values)[1]
    assert error < 0.8 * float(np.sum((values.astype(np.float64) - equal) ** 2))
