"""Helpers of the tests of the quantizers: values, a round trip, broken sections, the mean over many steps."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hvd_deepreduce.codecs.interfaces import RngKey

F32 = np.dtype(np.float32)
KEY = RngKey(1, 2, 3, 4)
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, 2.5, -2.5, 3.4e38, -3.4e38, 1e38, -1e-45, 1e-45, 1e-38, 1.5e-38, 6e4]
floats = st.one_of(st.sampled_from(SPECIAL), st.floats(width=32, allow_nan=False, allow_infinity=False))
vectors = arrays(F32, st.integers(0, 70), elements=floats.map(np.float32))


def normals(count, seed=0):
    random = np.random.default_rng(seed)
    return (random.standard_normal(count) * random.lognormal(size=count)).astype(np.float32)


AWKWARD = {
    "empty": np.empty(0, np.float32),
    "one": np.array([-3.25], np.float32),
    "zeros": np.zeros(1031, np.float32),
    "equal": np.full(1000, 0.1, np.float32),
    "negative": -np.abs(normals(517)),
    "denormal": (np.arange(-50, 50) * 1.4e-45).astype(np.float32),
    "huge": np.full(3000, 3.4e38, np.float32) * np.resize(np.array([1, -1, 1], np.float32), 3000),
    "wide": np.geomspace(1e-38, 1e38, 601).astype(np.float32),
    "some zero buckets": np.concatenate([np.zeros(600, np.float32), normals(600), np.zeros(600, np.float32)]),
    "prime": normals(10007),
    "float64": normals(700).astype(np.float64) * 1.000000001,
    "float64 out of range": np.array([1e300, -1e300, 1e-300, 0.0, 5.0]),
}


def round_trip(codec, values, key=KEY):
    section, order = codec.encode(values, None, key)
    assert order is None
    assert section.dtype == np.uint8
    before = values.copy()
    decoded = codec.decode(section, values.size, None, values.dtype, RngKey(*key[:3]))
    assert np.array_equal(values, before)
    assert decoded.shape == values.shape
    assert np.isfinite(decoded).all()
    return section, decoded


def mean_of_draws(codec, values, draws):
    """The mean and the variance of the decoded values over ``draws`` steps, float64."""
    total, squares = np.zeros(values.size), np.zeros(values.size)
    for step in range(draws):
        decoded = round_trip(codec, values, RngKey(5, 0, step, 1))[1].astype(np.float64)
        total += decoded
        squares += (decoded - values) ** 2
    return total / draws, squares / draws


def check_broken(codec, values, flips=300):
    """Checks that truncated and altered sections raise ``ValueError`` with a sentence, or decode to ``count`` finite
    values. Returns the number of altered sections that were refused."""
    section, _ = codec.encode(values, None, KEY)

    def decode(data, count=values.size):
        decoded = codec.decode(data, count, None, values.dtype, KEY)
        assert decoded.size == count
        assert np.isfinite(decoded).all()

    for size in [*range(min(section.size, 40)), *range(40, section.size, 37), section.size - 1]:
        with pytest.raises(ValueError, match=r"\w+ \w+ \w+"):
            decode(section[:size].copy())
    with pytest.raises(ValueError):
        decode(np.append(section, np.uint8(0)))
    for count in (values.size + 40, values.size - 40, 0, 2**32 - 1):
        with pytest.raises(ValueError):
            decode(section.copy(), count)
    random = np.random.default_rng(0)
    refused = 0
    for _ in range(flips):
        broken = section.copy()
        # Half of the flips are at the beginning, in the settings and scales.
        at = random.integers(min(section.size, 24) if random.random() < 0.5 else section.size)
        broken[at] ^= np.uint8(1 << random.integers(8))
        try:
            decode(broken)
        except ValueError:
            refused += 1
    return refused
