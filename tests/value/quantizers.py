"""Helpers of the tests of value codecs: values, a round trip, the mean over many steps."""

from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hvd_deepreduce.codecs.interfaces import RngKey
from tests import cases

F32 = np.dtype(np.float32)
KEY = RngKey(1, 2, 3, 4)
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, 2.5, -2.5, 3.4e38, -3.4e38, 1e38, -1e-45, 1e-45, 1e-38, 1.5e-38, 6e4, 1.0000001]
floats = st.one_of(st.sampled_from(SPECIAL), st.floats(width=32, allow_nan=False, allow_infinity=False))
vectors = arrays(F32, st.integers(0, 70), elements=floats.map(np.float32))
normals = cases.heavy
AWKWARD = {
    **cases.inputs(),
    "huge": np.full(3000, 3.4e38, np.float32) * np.resize(np.array([1, -1, 1], np.float32), 3000),
    "some zero buckets": np.concatenate([np.zeros(600, np.float32), normals(600), np.zeros(600, np.float32)]),
    "many": normals(5003),
}


def clipped(values: np.ndarray) -> np.ndarray:
    """The values as a codec of float32 takes them."""
    limit = np.finfo(np.float32).max
    return np.clip(values, -limit, limit).astype(np.float32)


def round_trip(codec: Any, values: np.ndarray, key: RngKey = KEY) -> tuple[np.ndarray, np.ndarray]:
    """The section, and what another rank decodes. A joint codec gets all elements of a tensor."""
    before, other = values.copy(), RngKey(*key[:3])
    if hasattr(codec, "encode_from"):
        section, support = codec.encode(None, values, values.size, key)
        again, decoded = codec.decode(section, values.size, values.size, True, values.dtype, other)
        assert support is None and again is None
    else:
        section, order = codec.encode(values, None, key)
        decoded = codec.decode(section, values.size, None, values.dtype, other)
        assert order is None
    assert section.dtype == np.uint8 and np.array_equal(values, before)
    assert decoded.shape == values.shape and np.isfinite(decoded).all()
    return section, decoded


def mean_of_draws(codec: Any, values: np.ndarray, draws: int) -> tuple[np.ndarray, np.ndarray]:
    """The mean and the variance of the decoded values over ``draws`` steps, float64."""
    total, squares = np.zeros(values.size), np.zeros(values.size)
    for step in range(draws):
        decoded = round_trip(codec, values, RngKey(5, 0, step, 1))[1].astype(np.float64)
        total += decoded
        squares += (decoded - values) ** 2
    return total / draws, squares / draws
