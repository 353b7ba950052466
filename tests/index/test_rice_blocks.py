"""The index codec ``rice_blocks``."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_deepreduce.codecs.index.rice import Rice
from hvd_deepreduce.codecs.index.rice_blocks import RiceBlocks
from hvd_deepreduce.codecs.interfaces import RngKey
from tests.cases import index_of_any_bytes
from tests.index.test_rice import EXTREMES
from tests.oracle import rice_blocks as oracle
from tests.oracle.rice import gaps

KEY = RngKey(1, 2, 3)


def check(indices, numel):
    kept = np.array(indices, np.uint32)
    section, support = RiceBlocks().encode(kept, numel, KEY)
    assert support is kept
    np.testing.assert_array_equal(RiceBlocks.decode(section, numel, kept.size, KEY), kept)
    if not indices:
        assert section.size == 0
        return None
    chosen = oracle.parameters(section.tobytes(), kept.size)
    for block, b in zip(oracle.blocks(gaps(indices)), chosen, strict=True):
        assert oracle.bits(block, b) == min(oracle.bits(block, other) for other in range(32))
    return section.tobytes(), chosen


@given(st.data())
def test_round_trip_with_the_best_parameters(data):
    spread = data.draw(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 90)), min_size=1, max_size=6))
    indices, index = [], -1
    for most, count in spread:  # runs of different densities
        for gap in data.draw(st.lists(st.integers(0, most), min_size=count, max_size=count)):
            index += gap + 1
            indices.append(index)
    numel = index + data.draw(st.integers(1, 50))
    section, chosen = check(indices, numel)
    assert section == oracle.encode(indices, chosen) and oracle.decode(section, len(indices)) == indices


@given(st.data())
def test_few_indices_in_a_tensor_of_any_size(data):
    numel = data.draw(st.integers(1, 2**32 - 1))
    indices = sorted(data.draw(st.sets(st.integers(0, numel - 1), max_size=6)))
    check(indices, numel)


DENSITIES = list(range(300)) + list(range(300, 1 << 26, 1 << 18)) + list(range(1 << 26, (1 << 26) + 300))


@pytest.mark.parametrize(("indices", "numel"), [*EXTREMES, (DENSITIES, 1 << 27)])
def test_extremes(indices, numel):
    check(indices, numel)


def test_clustered_indices_take_fewer_bits_than_with_one_parameter():
    rng = np.random.default_rng(0)
    dense = rng.choice(1 << 16, 3000, replace=False)
    thin = rng.choice(np.arange(1 << 16, 1 << 22), 3000, replace=False)
    indices = np.sort(np.concatenate([dense, thin])).astype(np.uint32)
    size = RiceBlocks().encode(indices, 1 << 22, KEY)[0].size
    assert size < 0.9 * Rice().encode(indices, 1 << 22, KEY)[0].size


@given(st.binary(max_size=60), st.integers(1, 5000), st.integers(0, 150))
def test_any_bytes(data, numel, count):
    found = index_of_any_bytes(RiceBlocks, data, numel, count)
    if found:
        assert found == oracle.decode(data, len(found))


def test_changed_and_truncated_sections():
    indices = np.sort(np.random.default_rng(1).choice(10000, 600, replace=False)).astype(np.uint32)
    section, _ = RiceBlocks().encode(indices, 10000, KEY)
    for size in range(section.size):
        with pytest.raises(ValueError):
            RiceBlocks.decode(section[:size].copy(), 10000, 600, KEY)
    for at in range(section.size):
        changed = section.copy()
        changed[at] ^= 1 << at % 8
        try:
            found = RiceBlocks.decode(changed, 10000, 600, KEY)
        except ValueError:
            continue
        assert found.tolist() == oracle.decode(changed.tobytes(), 600)


@pytest.mark.parametrize(
    ("section", "count", "message"),
    [([], 1, "ends before"), ([0], 1, "ends before"), ([31], 1, "ends before"), ([32, 255], 1, "other than zeros"),
     ([0, 0, 1], 1, "not below"), ([1, 1, 2, 0], 1, "continues|other than zeros"), ([0, 255], 9, "ends before")],
)  # fmt: skip
def test_sections_that_no_encoder_wrote(section, count, message):
    with pytest.raises(ValueError, match=message):
        RiceBlocks.decode(np.array(section, np.uint8), 8, count, KEY)
