"""The index codec ``rice``."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_deepreduce.codecs.index.rice import Rice
from hvd_deepreduce.codecs.interfaces import RngKey
from tests.cases import index_of_any_bytes
from tests.oracle import rice as oracle

KEY = RngKey(1, 2, 3)


def check(indices, numel):
    kept = np.array(indices, np.uint32)
    section, support = Rice().encode(kept, numel, KEY)
    assert support is kept
    np.testing.assert_array_equal(Rice.decode(section, numel, kept.size, KEY), kept)
    if not indices:
        assert section.size == 0
        return
    b = int(section[0])
    assert oracle.bits(indices, b) == min(oracle.bits(indices, other) for other in range(32))
    return section.tobytes(), b


@given(st.data())
def test_round_trip_with_the_best_parameter(data):
    numel = data.draw(st.integers(1, 2000))
    indices = sorted(data.draw(st.sets(st.integers(0, numel - 1), max_size=150)))
    if indices:
        section, b = check(indices, numel)
        assert section == oracle.encode(indices, b) and oracle.decode(section, len(indices)) == indices


@given(st.data())
def test_few_indices_in_a_tensor_of_any_size(data):
    numel = data.draw(st.integers(1, 2**32 - 1))
    indices = sorted(data.draw(st.sets(st.integers(0, numel - 1), max_size=6)))
    check(indices, numel)


EXTREMES = [
    ([], 0), ([], 9), ([0], 1), ([2**32 - 2], 2**32 - 1), ([0, 2**32 - 2], 2**32 - 1), (list(range(500)), 500),
    (list(range(499, 1000)), 1000), (list(range(2, 3000, 3)), 3000), (list(range(7, 1 << 20, 8)), 1 << 20),
]  # fmt: skip


@pytest.mark.parametrize(("indices", "numel"), EXTREMES)
def test_extremes(indices, numel):
    check(indices, numel)


def test_size_is_within_two_percent_of_the_entropy():
    rng = np.random.default_rng(0)
    for numel, count in ((1 << 20, 10486), (1 << 20, 1049), (36864, 368)):
        indices = np.sort(rng.choice(numel, count, replace=False)).astype(np.uint32)
        section, _ = Rice().encode(indices, numel, KEY)
        p = count / numel
        entropy = numel * -(p * np.log2(p) + (1 - p) * np.log2(1 - p))
        assert section.size * 8 < entropy * 1.02 + 32


@given(st.binary(max_size=60), st.integers(1, 5000), st.integers(0, 100))
def test_any_bytes(data, numel, count):
    found = index_of_any_bytes(Rice, data, numel, count)
    if found:
        assert found == oracle.decode(data, len(found))


@pytest.mark.parametrize(
    ("section", "count", "message"),
    [([], 1, "ends before"), ([0], 1, "ends before"), ([0, 0, 0], 1, "ends before"), ([32, 255, 255], 1, "not below"),
     ([0, 0, 1], 1, "not below"), ([31] + [255] * 5, 1, "not below"), ([3, 255], 3, "ends before"),
     ([5], 0, "no indices")],
)  # fmt: skip
def test_sections_that_no_encoder_wrote(section, count, message):
    with pytest.raises(ValueError, match=message):
        Rice.decode(np.array(section, np.uint8), 8, count, KEY)


def test_truncated_sections_are_refused():
    indices = np.sort(np.random.default_rng(1).choice(10000, 300, replace=False)).astype(np.uint32)
    section, _ = Rice().encode(indices, 10000, KEY)
    for size in range(section.size):
        with pytest.raises(ValueError):
            Rice.decode(section[:size].copy(), 10000, 300, KEY)
