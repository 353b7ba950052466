"""MinMaxSketches and their sections, on the host and on a GPU."""

import numpy as np
import pytest

from hvd_deepreduce.codecs.joint.minmax_sketch import groups_of
from hvd_deepreduce.ops import quantile, sketch, sort
from tests import cases
from tests.ops.compare import KEY, VALUES, both, same, some_indices


@pytest.mark.parametrize("rows, columns", [(1, 1), (2, 37), (8, 400)])
def test_sketch(gpu, rows, columns):
    rng = np.random.default_rng(rows)
    for count in (0, 1, 1500):
        keys, numbers = some_indices(10**6, count), rng.integers(0, 200, count).astype(np.uint8)
        bins = both(gpu, sketch.insert, keys, numbers, rows, columns, 200, *KEY)
        means = cases.random(200)
        both(gpu, sketch.query, keys, bins, means, rows, columns, *KEY)
        both(gpu, sketch.query, keys, bins, means[:-1], rows, columns, *KEY)
        codes = rng.integers(0, 300, count).astype(np.uint32)
        for group, groups in ((100, 3), (2, 150), (300, 1)):
            first = np.arange(groups, dtype=np.uint32) * group
            both(gpu, sketch.split_groups, keys, codes, np.arange(300, dtype=np.uint32) // group, first)
        shuffled = rng.permutation(keys)
        both(gpu, sort.by_key, shuffled, cases.random(count), 10**6)
        both(gpu, sort.by_key, shuffled, cases.random(count), int(keys.max(initial=1)))
        both(gpu, sort.by_key, np.append(shuffled, shuffled[:1]), cases.random(count + min(count, 1)), 10**6)


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("buckets, groups, rows", [(2, 1, 1), (40, 6, 2), (256, 8, 3)])
def test_sections(gpu, coded, buckets, groups, rows):
    for x in (cases.random(1700), np.abs(cases.random(90)), VALUES["few_values"][:300], VALUES["one"]):
        indices = some_indices(30_000, x.size)
        means, codes, negative = quantile.encode(x, buckets, False)
        below, above = (groups_of(side, means.size, groups) for side in (negative, means.size - negative))
        header = sketch.Header(rows, 13_107, means.size, negative, below, above)
        section = both(gpu, sketch.encode, header, means, indices, codes, coded, *KEY)
        assert sketch.Header.of(section) == header
        both(gpu, sketch.decode, section, 30_000, x.size, coded, *KEY)
        start, sizes_at = header.parts_at, 20 + 4 * means.size
        for at, size in ((20, 4), (sizes_at, 1), (sizes_at + 4, 1), (sizes_at + 8, 1), (start, 1)):
            other = section.copy()
            other[at : at + size] ^= 0xFF
            both(gpu, sketch.decode, other, 30_000, x.size, coded, *KEY)
    both(gpu, sketch.decode, section, 30_000, 2, coded, *KEY)
    both(gpu, sketch.decode, section[:-1], 30_000, 1, coded, *KEY)


@pytest.mark.parametrize("coded", [False, True])
def test_all_groups_are_encoded_at_once(gpu, coded):
    """The launches and waits are those of one group."""
    if not hasattr(gpu.module, "waits"):
        pytest.skip("only the emulator counts waits")
    x, indices = cases.random(700), gpu.put(some_indices(30_000, 700))
    means, codes, negative = quantile.encode(x, 64, False)
    there, codes = gpu.put(means), gpu.put(codes)
    found = []
    for groups in (1, 20):
        header = sketch.Header(2, 13_107, means.size, negative, groups, groups)
        before = gpu.module.launches, gpu.module.waits
        sketch.encode(header, there, indices, codes, coded, *KEY)
        found.append((gpu.module.launches - before[0], gpu.module.waits - before[1]))
    assert found[0] == found[1] and found[0][1] == 2


@pytest.mark.parametrize("coded", [False, True])
def test_sections_whose_bins_take_no_bytes(gpu, coded):
    """8 x 4 bins for each key, all equal: nothing of their number is allocated, and a sketch of one bin answers."""
    x, indices = np.ones(900, np.float32), some_indices(30_000, 900)
    means, codes, negative = quantile.encode(x, 4, False)
    header = sketch.Header(8, 4 * 65536, means.size, negative, 0, 1)
    section = both(gpu, sketch.encode, header, means, indices, codes, coded, *KEY)
    keys, values = both(gpu, sketch.decode, section, 30_000, 900, coded, *KEY)
    same((keys, values), (indices, x))
    for other in (section[:-1], np.append(section, np.uint8(0)), np.append(section[:-1], np.uint8(255))):
        both(gpu, sketch.decode, other, 30_000, 900, coded, *KEY)
    if coded:  # the only symbol that occurs is no bucket
        other = section.copy()
        other[-1] = 0xF0
        grown = np.append(other, np.uint8(0xFF))
        sizes_at = 20 + 4 * means.size
        grown[sizes_at + 8 : sizes_at + 12] = np.frombuffer(np.uint32(2).tobytes(), np.uint8)
        both(gpu, sketch.decode, grown, 30_000, 900, coded, *KEY)
