"""Helpers of the tests of ``sketchml`` and ``skcompress``."""

from typing import Any

import numpy as np

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.joint.minmax_sketch import MinMaxSketch

KEY = RngKey(11, 22, 33)
F32 = np.dtype(np.float32)


def gradient(numel: int, count: int, seed: int = 0) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Sorted indices of the ``count`` largest magnitudes of a heavy-tailed vector, and their values."""
    random = np.random.default_rng(seed)
    dense = (random.standard_normal(numel) * random.lognormal(size=numel)).astype(np.float32)
    indices = np.sort(np.argsort(-np.abs(dense), kind="stable")[:count]).astype(np.uint32)
    return indices, dense[indices]


def round_trip(codec: MinMaxSketch, indices: Any, values: Any, numel: int, key: RngKey = KEY) -> tuple[Any, Any]:
    """Checks the support, and returns the section and the decoded values."""
    section, support = codec.encode(indices, values, numel, key)
    decoded_support, decoded = codec.decode(section, numel, values.size, indices is None, values.dtype, key)
    if indices is None:
        assert support is None
        assert decoded_support is None
    else:
        assert (support == indices).all()
        assert decoded_support is not None
        assert decoded_support.dtype == np.uint32
        assert (decoded_support == indices).all()
    assert decoded.size == values.size
    assert np.isfinite(decoded).all()
    return section, decoded
