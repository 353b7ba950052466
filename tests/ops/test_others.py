"""Operations with few cases, on the host and on a GPU: block norms, Bloom filters, hashes, momentum, random indices and
sorts. tests/exchange/test_messages.py tests what a hash finds."""

import numpy as np
import pytest

from hvd_deepreduce.ops import arrays, blocks, bloom, hash, momentum, random, sort
from hvd_deepreduce.ops.hash import hash64
from tests import cases
from tests.ops.compare import INDICES, INPUTS, KEY, VALUES, both, same, some_indices


@pytest.mark.parametrize("name", INPUTS)
def test_block_norms(gpu, name):
    x = INPUTS[name]
    for block in (1, 7, 64, 1000):
        for l2 in (True, False):
            both(gpu, blocks.norms, x, None, block, l2)
            both(gpu, blocks.norms, x, x, block, l2)


@pytest.mark.parametrize("numel, block", [(10, 64), (100, 7), (98, 7), (2**32 - 1, 2**31), (5000, 1)])
def test_block_indices(gpu, numel, block):
    count = -(-numel // block)
    for kept in {(0,), (count - 1,), (0, count - 1) if count > 1 else (0,)} if block < 2**20 else ():
        both(gpu, blocks.indices, np.array(kept, np.uint32), block, numel)


@pytest.mark.parametrize("name", INDICES)
def test_blocks_of_indices(gpu, name):
    indices, numel = INDICES[name]
    for block in (4, 1000) if numel < 2**24 else (2**20,):  # a bitmap of all blocks is made
        both(gpu, blocks.numbers, indices, block, -(-numel // block))


@pytest.mark.parametrize("name", sorted(set(INDICES) - {"far"}))
@pytest.mark.parametrize("hashes, bits", [(1, 3), (10, 15), (30, 44)])
def test_bloom(gpu, name, hashes, bits):
    indices, numel = INDICES[name]
    if numel > 2**19:
        numel, indices = 2**14, indices[:1]
    bits = both(gpu, bloom.insert, indices, max(8, indices.size * bits // 8), hashes, *KEY)
    both(gpu, bloom.query, bits, hashes, numel, *KEY)
    both(gpu, bloom.query, np.full(9, 255, np.uint8), hashes, 1003, *KEY)


def test_conflict_sets(gpu):
    indices, numel = INDICES["some"]
    bits = bloom.insert(indices, 400, 8, *KEY)
    positives = bloom.query(bits, 8, numel, *KEY)
    both(gpu, bloom.conflict_sets, positives, indices.size, 10**6, 400, 8, *KEY)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_hashes_of_parts(gpu, dtype):
    """At any place, of any size: less than a word, than a stripe of 64 bytes, than what a block takes at once."""
    dense = cases.random(9001, dtype)
    parts = [(0, 9001), (1, 2), (1, 3), (3, 18), (7, 7 + 16), (7, 7 + 17), (11, 4000), (9000, 9001), (5, 5)]
    found = both(gpu, hash.hash_parts, dense, parts)
    assert found == [hash64(dense[i:j].copy()) for i, j in parts] and len(set(found)) == len(parts)
    both(gpu, hash.hash_parts, dense, parts[3:4])
    both(gpu, hash.hash_parts, dense, [])


def test_a_changed_bit_changes_the_hash_of_its_part_only(gpu):
    dense, parts = cases.random(3000), [(0, 1000), (1000, 1999), (1999, 3000)]
    before = hash.hash_parts(gpu.put(dense), parts)
    dense.view(np.uint32)[1998] ^= 1 << 9
    after = hash.hash_parts(gpu.put(dense), parts)
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False, True]


@pytest.mark.parametrize("name", INPUTS)
def test_correct_and_keep(gpu, name):
    x = INPUTS[name]
    y = x[::-1].copy()  # a reversed view of one element is the element itself
    for nesterov in (False, True):
        corrected, _ = both(gpu, momentum.correct, x, y, 0.9, 0.7, nesterov)
        for sent in (None, some_indices(x.size, x.size // 2), np.empty(0, np.uint32)):
            both(gpu, momentum.keep, x, corrected, sent)
    if x.size:
        y[x.size // 2] = np.nan
        corrected, sent = both(gpu, momentum.correct, x, y, 0.9, 0.7, True)
        assert np.isnan(corrected[x.size // 2]) and np.isnan(sent).sum() == 1
    assert momentum.clip_scale(x, 0.5) == momentum.clip_scale(gpu.put(x), 0.5)


@pytest.mark.parametrize("name", INPUTS)
def test_scaled(gpu, name):
    x = INPUTS[name]
    y, squares = x[::-1].copy(), x.copy()  # squares below 0 count as 0
    for step, scale in ((1, 1.0), (3, 0.7)):
        for found in both(gpu, momentum.scaled, squares, x, y, 0.99, step, 0.98, 1e-8, scale):
            assert np.isfinite(found).all()
    if x.size:
        y[x.size // 2] = -np.inf
        for found in both(gpu, momentum.scaled, squares, y, x, 0.9, 2, 0.5, 1e-30, 1.0):
            assert np.flatnonzero(~np.isfinite(found)).tolist() == [x.size // 2]


@pytest.mark.parametrize("name", INPUTS)
def test_advancing_in_place(name):
    """As what is computed elsewhere, added and kept; no device has it."""
    x = INPUTS[name]
    gradient, residual, none = x[::-1].copy(), np.roll(x, 1), np.empty(0, np.uint32)
    for settings in ((0.9, 0.7, False), (0.9, 0.7, True)):
        velocity, kept, got, moved = x.copy(), x.copy(), residual.copy(), residual.copy()
        corrected, added = momentum.correct(velocity, gradient, *settings)
        arrays.add(got, added)
        momentum.keep(velocity, corrected, none)
        momentum.advance_velocity(kept, gradient, moved, *settings)
        same(kept, velocity), same(moved, got)
    squares, kept, got, moved = x.copy(), x.copy(), residual.copy(), residual.copy()
    following, added = momentum.scaled(squares, gradient, got, 0.99, 3, 0.98, 1e-8, 0.7)
    arrays.add(got, added)
    momentum.advance_squares(kept, gradient, moved, 0.99, 3, 0.98, 1e-8, 0.7)
    same(kept, following), same(moved, got)


@pytest.mark.parametrize("numel, count", [(1, 1), (2, 1), (307, 0), (307, 30), (307, 307), (100_003, 999)])
def test_random_indices(gpu, numel, count):
    want = random.indices(numel, count, *KEY, None)
    same(gpu.host(random.indices(numel, count, *KEY, gpu.put(np.zeros(1)))), want)


@pytest.mark.parametrize("first, count", [(0, 40), (60, 40), (99, 1), (100, 0), (10, 90)])
def test_the_last_images_are_what_the_first_ones_leave(gpu, first, count):
    like = np.empty(0, np.uint8)
    ours = both(gpu, random.indices, 100, count, *KEY, like, first)
    before = random.indices(100, first, *KEY, like)
    after = random.indices(100, 100 - first - count, *KEY, like, first + count)
    assert sorted([*before, *ours, *after]) == list(range(100))


@pytest.mark.parametrize("name", VALUES)
def test_by_value(gpu, name):
    both(gpu, sort.by_value, VALUES[name])


@pytest.mark.parametrize("numel, width", [(0, 32), (1, 3), (33, 6), (5003, 13), (20_011, 17), (2048, 32)])
def test_by_index(gpu, numel, width):
    order = np.random.default_rng(3).permutation(numel).astype(np.uint32)
    both(gpu, sort.by_index, order + np.uint32(7), width)
    both(gpu, sort.by_index, order * np.uint32(200_000) if width == 32 else order, width)
    if numel:
        order[0] = order[-1]
        both(gpu, sort.by_index, order, width)


@pytest.mark.parametrize("most, width", [(1, 0), (50, 6), (2**32, 32)])
def test_by_index_with_many_equal_indices(gpu, most, width):
    few = np.random.default_rng(3).integers(0, most, 100)
    both(gpu, sort.by_index, np.random.default_rng(4).choice(few, 9000).astype(np.uint32), width)
