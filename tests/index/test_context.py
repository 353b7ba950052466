"""The index codec ``context`` and the joint codec ``context_qsgd``."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_deepreduce.codecs.index.context import Context
from hvd_deepreduce.codecs.index.rice_blocks import RiceBlocks
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.joint.context_qsgd import ContextQSGD
from hvd_deepreduce.codecs.value.qsgd import QSGD
from hvd_deepreduce.ops import context
from tests.oracle import context as oracle
from tests.selection import examples

KEY = RngKey(1, 2, 3)


@st.composite
def supports(draw):
    """Runs of windows of different densities, some without a single element."""
    indices: list[int] = []
    begin = draw(st.integers(0, 300))
    for _ in range(draw(st.integers(1, 5))):
        length = draw(st.sampled_from([1, 64, 128, 200, 640]))
        share = draw(st.sampled_from([0.003, 0.02, 0.1, 0.4, 0.7, 1.0]))
        rng = np.random.default_rng(draw(st.integers(0, 99)))
        indices += (begin + np.flatnonzero(rng.random(length) < share)).tolist()
        begin += length + draw(st.sampled_from([0, 100, 5000, 10**6]))
    return indices


@settings(deadline=None, max_examples=examples(60))
@given(supports(), st.integers(0, 8), st.integers(1, 300))
def test_sections_are_the_oracle_s(indices, bits, more):
    if not indices:
        return
    bits = 0 if bits == 1 else bits
    numel, kept = indices[-1] + more, np.array(indices, np.uint32)
    codes = np.random.default_rng(len(indices)).integers(0, 2**bits, len(indices)).astype(np.uint8)
    section = context.encode(kept, numel, codes if bits else None, bits)
    assert section.tobytes() == oracle.encode(indices, numel, codes.tolist(), bits)
    found, values = context.decode(section, numel, kept.size, bits)
    np.testing.assert_array_equal(found, kept)
    np.testing.assert_array_equal(values, codes if bits else [])


@pytest.mark.parametrize("density", [0.003, 0.02, 0.9])
def test_sections_with_parts_are_the_oracle_s(density):
    rng = np.random.default_rng(3)
    numel = int(5000 / density)
    row = np.repeat(density * np.exp(rng.normal(0, 0.5, numel // 200 + 1)), 200)[:numel]
    kept = np.flatnonzero(rng.random(numel) < row).astype(np.uint32)
    codes = rng.integers(0, 7, kept.size).astype(np.uint8)
    assert kept.size >= 4096
    section = context.encode(kept, numel, codes, 3)
    assert section.tobytes() == oracle.encode(kept.tolist(), numel, codes.tolist(), 3)
    found, values = context.decode(section, numel, kept.size, 3)
    np.testing.assert_array_equal(found, kept)
    np.testing.assert_array_equal(values, codes)


@pytest.mark.parametrize("place", range(24))
def test_parts_that_no_encoder_wrote(place):
    """Each byte of the numbers that say where parts begin, after the two bytes of the number of words."""
    kept = np.arange(0, 90000, 18, dtype=np.uint32)
    section = context.encode(kept, 90000)
    assert section[0] >= 128 and section[1] < 128
    section[2 + place] ^= 1
    with pytest.raises(ValueError):
        context.decode(section, 90000, kept.size)


def test_rows_of_different_density_take_fewer_bytes_than_with_rice():
    rng = np.random.default_rng(0)
    density = np.repeat(0.01 * np.exp(rng.normal(0, 1.5, 2000)), 256)
    indices = np.flatnonzero(rng.random(density.size) < density).astype(np.uint32)
    p = np.minimum(density, 0.5)
    entropy = -np.sum(p * np.log2(p) + (1 - p) * np.log2(1 - p)) / 8
    size = Context().encode(indices, density.size, KEY)[0].size
    assert entropy < size < 1.06 * entropy and size < 0.97 * RiceBlocks().encode(indices, density.size, KEY)[0].size


@pytest.mark.parametrize("bits", [2, 3, 4, 7, 8])
def test_joint_values_are_those_of_qsgd(bits):
    rng = np.random.default_rng(bits)
    indices = np.sort(rng.choice(20000, 1500, replace=False)).astype(np.uint32)
    values = rng.standard_normal(1500).astype(np.float32)
    codec = ContextQSGD(bits=bits, bucket_size=100)
    section, support = codec.encode(indices, values, 20000, KEY)
    found, decoded = ContextQSGD.decode(section, 20000, 1500, False, values.dtype, KEY)
    assert support is indices
    np.testing.assert_array_equal(found, indices)
    value = QSGD(bits=bits, bucket_size=100, fit_scale=True)
    wanted = QSGD.decode(value.encode(values, indices, KEY)[0], 1500, indices, values.dtype, KEY)
    np.testing.assert_array_equal(decoded, wanted)


@pytest.mark.parametrize("header", [[1, 0, 0, 0, 1, 0, 0, 0], [9, 0, 0, 0, 1, 0, 0, 0], [3, 1, 0, 0, 1, 0, 0, 0],
                                    [3, 0, 0, 0, 0, 0, 0, 0], [3, 0, 0, 0, 1, 0]])  # fmt: skip
def test_joint_headers_that_no_encoder_wrote(header):
    section, _ = ContextQSGD(bits=3, bucket_size=1).encode(np.uint32([5]), np.float32([2]), 9, KEY)
    with pytest.raises(ValueError):
        ContextQSGD.decode(np.append(np.uint8(header), section[8:]), 9, 1, False, np.dtype(np.float32), KEY)
    with pytest.raises(ValueError, match="no elements"):
        ContextQSGD.decode(section, 9, 0, False, np.dtype(np.float32), KEY)
