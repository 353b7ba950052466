"""Bytes of the preset ``sparseloco`` beside those of SparseLoCo's published wire format, for the same updates."""

import chunk_codes
import numpy as np
import pytest

from hvd_deepreduce import Config
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.wire.frame import split

KEY = RngKey(1, 2, 3)


def test_the_published_format_is_counted_to_the_byte():
    """12 and 2 bits for each of 64 elements, and a table of four float32."""
    assert chunk_codes.published_bytes(64) == 64 * 14 // 8 + 16
    assert chunk_codes.published_bytes(3, chunk=4097, tables=2) == 6 + 32


def test_the_bound_is_that_of_an_enumeration():
    indices = np.uint32([0, 2, 5, 6])  # 2 of 4 and 2 of 4: 6 ways each
    assert chunk_codes.bound(indices, 8, chunk=4) == pytest.approx(2 * np.log2(6))


@pytest.mark.parametrize("chunks", [64, 256])
def test_the_same_updates_take_at_most_0_68_of_the_published_bytes(chunks):
    vector = np.random.default_rng(chunks).standard_normal(4096 * chunks).astype(np.float32)
    pipeline = Pipeline(Config.load("sparseloco"))
    packed = pipeline.encode(vector, None, KEY, version=2)
    assert packed.size <= 0.68 * chunk_codes.published_bytes(64 * chunks)
    # They are the same updates: 64 elements of each chunk, and at most four different values.
    (containers,) = split(packed, 1, [pipeline.expected(vector.size, vector.dtype, KEY)])
    out = np.empty_like(vector)
    pipeline.decode(containers, out)
    assert (np.bincount(np.flatnonzero(out) // 4096) == 64).all()
    assert np.unique(out[out != 0]).size == 4
