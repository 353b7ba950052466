"""Every CUDA operation gives the bytes of the CPU's on awkward inputs, in the emulator or on a GPU: see conftest.py."""

import inspect

import numpy as np
import pytest

from hvd_deepreduce.backend import cpu, cuda
from tests import cases

INPUTS = {
    **cases.inputs(),
    "five_thousand": cases.random(5003),
    "few_values": np.random.default_rng(3).choice([0.0, 1.0, -1.0, 0.5], 2500).astype(np.float32),
    "ties": np.tile(np.float32([0.25, -2.0, 2.0, 0.0]), 1200),
    "float64_long": cases.random(4099, np.float64),
}
VALUES = {name: x for name, x in INPUTS.items() if x.dtype == np.float32}
KEY = (7, 3, 11)
BUCKETS = [1, 6, 512, 6000, 2**31]


def same(got, want):
    if isinstance(want, tuple | list):
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            same(g, w)
        return
    if isinstance(want, np.ndarray):
        assert got.dtype == want.dtype and got.shape == want.shape
        assert got.tobytes() == want.tobytes()
        return
    assert got == want


def both(device, name, *arguments, **settings):
    """The operation on both backends, with equal results: arrays, and what they become where they are changed."""
    ours, theirs = [], []
    for argument in arguments:
        if isinstance(argument, np.ndarray):
            ours.append(argument.copy())
            theirs.append(device.bytes(argument) if argument.dtype == np.uint8 else device.put(argument))
        else:
            ours.append(argument)
            theirs.append(argument)
    try:
        want = getattr(cpu, name)(*ours, **settings)
    except ValueError:
        with pytest.raises(ValueError):
            getattr(cuda, name)(*theirs, **settings)
        return None
    got = getattr(cuda, name)(*theirs, **settings)
    same(device.host(got), want)
    for our, their in zip(ours, theirs, strict=True):
        if isinstance(our, np.ndarray):
            same(device.host(their), our)
    return want


def some_indices(numel, count, seed=1):
    return np.sort(np.random.default_rng(seed).choice(numel, count, replace=False)).astype(np.uint32)


INDICES = {
    "one_of_one": (np.uint32([0]), 1),
    "last": (np.uint32([4096]), 4097),
    "all": (np.arange(777, dtype=np.uint32), 777),
    "some": (some_indices(36_864, 368), 36_864),
    "dense": (some_indices(3000, 1900), 3000),
    "runs": (np.concatenate([np.arange(a, a + 40, dtype=np.uint32) for a in range(7, 9000, 301)]), 10_000),
    "far": (np.uint32([5, 2**31, 2**32 - 2]), 2**32 - 1),
    "ends": (np.uint32([0, 2**20]), 2**20 + 1),
    "more_than_a_tile": (some_indices(50_021, 2100), 50_021),
}


@pytest.mark.parametrize("name", INPUTS)
def test_topk(device, name):
    x = INPUTS[name]
    y = np.random.default_rng(5).permutation(x) * x.dtype.type(0.5)
    for k in {0, min(1, x.size), x.size // 10, x.size}:
        both(device, "topk", x, None, k)
        both(device, "topk", x, y, k)


def test_topk_where_the_sample_misleads(device):
    """All of the large ones where the sample does not look, and more ties than there is room for."""
    x = np.zeros(300_000, np.float32)
    x[:40] = 3.0
    both(device, "topk", x, None, 60)
    x[:] = -0.5
    both(device, "topk", x, x, 1000)


def test_topk_of_unaligned_views(device):
    x = cases.random(5000)
    want = cpu.topk(x[3:].copy(), None, 77)
    same(device.host(cuda.topk(device.put(x)[3:], None, 77)), want)


@pytest.mark.parametrize("name", INPUTS)
def test_threshold_and_nonzero(device, name):
    x = INPUTS[name]
    for least in (0.0, 0.5, 1e-40, 1e300):
        both(device, "threshold", x, None, least)
        both(device, "threshold", x, np.ascontiguousarray(-x[::-1]), least)


def test_threshold_keeps_more_than_there_is_room_for(device):
    both(device, "threshold", cases.random(140_000), cases.random(140_000, seed=2), 0.01)


@pytest.mark.parametrize("name", INPUTS)
def test_dense(device, name):
    x = INPUTS[name]
    both(device, "add", x, np.ascontiguousarray(x[::-1]))
    both(device, "finite", x)
    for bad in (np.nan, np.inf, -np.inf):
        for at in {0, x.size // 2, x.size - 1} if x.size else ():
            broken = x.copy()
            broken[at] = bad
            both(device, "finite", broken)
    for block in (1, 7, 64, 1000):
        for l2 in (True, False):
            both(device, "block_norms", x, None, block, l2)
            both(device, "block_norms", x, x, block, l2)
    if x.size:
        at = some_indices(x.size, (x.size + 1) // 2)
        both(device, "gather", x, at)
        both(device, "settle", x, at, x[at] * x.dtype.type(0.75))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("parts", [0, 1, 4, 11])
def test_sum(device, dtype, parts):
    for numel in (1, 2048, 5003):
        given = []
        for p in range(parts):
            count = [0, numel, max(1, numel // 20)][p % 3]
            at = some_indices(numel, count, p)
            given.append((at, cases.random(count, dtype, p)))
        given.append((None, cases.random(numel, dtype, 99)))
        for scale in (1.0, 0.25):
            want, got = np.empty(numel, dtype), device.put(np.empty(numel, dtype))
            cpu.sum_into(want, given, scale)
            cuda.sum_into(got, [(None if i is None else device.put(i), device.put(v)) for i, v in given], scale)
            same(device.host(got), want)


def test_sum_of_nothing(device):
    got = device.put(np.ones(5000, np.float32))
    cuda.sum_into(got, [], 3.0)
    assert not device.host(got).any()


def test_joined(device):
    """Headers, arrays of any address, padding and the checksum; and what the host remembers of it."""
    random = np.random.default_rng(2)
    for sizes in ((0, 0, 0), (3,), (1, 7, 9), (8, 16, 24), (2048, 5, 0, 4097), (0, 1)):
        arrays = [random.integers(0, 256, size).astype(np.uint8) for size in sizes]
        for header in (b"", b"x", b"four", bytes(range(64))):
            for pad in (1, 8):
                both(device, "joined", header, *arrays, pad=pad)
            section = both(device, "joined", header.ljust(64), *arrays, pad=8, checked=True)
            cuda.check_container(device.put(section))
            for at in (0, 13, 40, section.size - 1):
                broken = section.copy()
                broken[at] ^= 1
                with pytest.raises(ValueError, match="altered"):
                    cuda.check_container(cuda.aligned(device.bytes(broken)))
    values = cases.random(33)
    both(device, "joined", b"12345678", values, pad=8)
    part = cpu.joined(b"head", random.integers(0, 256, 100).astype(np.uint8))
    assert cuda.head(device.bytes(part), 4) == b"head" and cuda.head(device.bytes(part[:3]), 4) == b"hea"
    with cuda.reading(device.put(values)):  # the host has not seen the checksum
        assert cuda.head(cuda.joined(bytes(64), device.put(values), checked=True), 64)[12:16] != bytes(4)


def test_orders(device):
    """Permutations, and what only looks like one."""
    random = np.random.default_rng(3)
    for numel in (0, 1, 33, 5003):
        order = random.permutation(numel).astype(np.uint32)
        both(device, "check_order", order)
        both(device, "scatter", random.standard_normal(numel), order)
        both(device, "scatter", random.standard_normal(numel).astype(np.float32), order)
        both(device, "gather", order, order)
        both(device, "sort_indices", order + np.uint32(7))
        both(device, "moved", order, 2**31)
        if numel:
            for at, value in ((0, numel), (numel - 1, 2**32 - 1), (0, order[-1])):
                wrong = order.copy()
                wrong[at] = value
                both(device, "check_order", wrong)
            both(device, "sort_indices", wrong)
    both(device, "sort_indices", random.integers(0, 50, 3000).astype(np.uint32))


@pytest.mark.parametrize("numel, block", [(10, 64), (100, 7), (98, 7), (2**32 - 1, 2**31), (5000, 1)])
def test_blocks(device, numel, block):
    blocks = -(-numel // block)
    for kept in {(0,), (blocks - 1,), (0, blocks - 1) if blocks > 1 else (0,)} if block < 2**20 else ():
        both(device, "of_blocks", np.array(kept, np.uint32), block, numel)


@pytest.mark.parametrize("numel, count", [(1, 1), (2, 1), (307, 0), (307, 30), (307, 307), (100_003, 999)])
def test_random_indices(device, numel, count):
    want = cpu.random_indices(numel, count, *KEY)
    same(device.host(cuda.random_indices(numel, count, *KEY, like=device.put(np.zeros(1)))), want)


@pytest.mark.parametrize("width", [0, 1, 2, 3, 5, 7, 8, 13, 25, 31, 32])
def test_pack(device, width):
    for count in (0, 1, 7, 1000):
        fields = np.random.default_rng(count).integers(0, 2**width, count).astype(np.uint32)
        section = both(device, "pack", fields, width)
        both(device, "unpack", section, count, width, np.uint32)
        if width <= 8:
            both(device, "pack", fields.astype(np.uint8), width)
            both(device, "unpack", section, count, width, np.uint8)
        both(device, "unpack", section[:-1], count, width, np.uint32)


def broken(section, count=12):
    """The section cut, extended and with bits flipped."""
    yield section[: section.size // 2]
    yield section[:-1]
    yield np.append(section, np.uint8(0))
    yield np.append(section, np.uint8(1))
    rng = np.random.default_rng(section.size)
    for _ in range(count if section.size else 0):
        other = section.copy()
        other[rng.integers(section.size)] ^= 1 << rng.integers(8)
        yield other
    if section.size:
        for first in (0, 17, 255):
            other = section.copy()
            other[0] = first
            yield other


CODES = ["bitmap", "rice", "elias_fano", "flagged", "rle", "huffman_indices", "rans_indices", "delta"]
TAKES_NUMEL = {"bitmap", "rice", "elias_fano", "rle", "huffman_indices"}


def encoded(device, code, indices, numel):
    return both(device, f"{code}_encode", indices, *([numel] if code in TAKES_NUMEL else []))


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("name", INDICES)
def test_index_codes(device, code, name):
    indices, numel = INDICES[name]
    if code == "bitmap" and numel > 2**24:
        return
    section = encoded(device, code, indices, numel)
    same(both(device, f"{code}_decode", section, numel, indices.size), indices)
    for other in broken(section):
        both(device, f"{code}_decode", other, numel, indices.size)
    both(device, f"{code}_decode", section, numel, indices.size + 1)
    both(device, f"{code}_decode", section, max(1, int(indices[-1])), indices.size)


def test_codes_of_no_indices(device):
    nothing = np.empty(0, np.uint32)
    for code in set(CODES) - {"rice"}:
        section = encoded(device, code, nothing, 100)
        both(device, f"{code}_decode", section, 100, 0)
        both(device, f"{code}_decode", np.zeros(2, np.uint8), 100, 0)


def test_check_indices(device):
    for indices in ([], [0], [3, 4, 9], [3, 3], [4, 3], [9, 10]):
        both(device, "check_indices", np.array(indices, np.uint32), 10)


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("bucket", BUCKETS)
def test_qsgd(device, name, bucket):
    x = VALUES[name][: 200 * bucket]
    for l2 in (False, True):
        for levels in (1, 127):
            norms, codes = both(device, "qsgd_encode", x, bucket, levels, l2, *KEY, 2)
            both(device, "qsgd_decode", norms, codes, bucket, levels)
        both(device, "qsgd_norms", x, bucket, l2)
        both(device, "qsgd_codes", x, norms * np.float32(0.5), bucket, 1, *KEY, 0)
    if x.size:
        for wrong in (np.nan, np.inf, -1.0):
            norms[-1] = wrong
            both(device, "qsgd_decode", norms, codes, bucket, 127)
        norms[-1] = 1
        codes[x.size // 2] = 255
        both(device, "qsgd_decode", norms, codes, bucket, 127)


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("bucket", BUCKETS)
def test_other_quantizers(device, name, bucket):
    x = VALUES[name][: 200 * bucket]
    for squares in (False, True):
        both(device, "bucket_sums", x, bucket, squares)
        both(device, "bucket_means", x, bucket)
        both(device, "clip_scales", cpu.qsgd_norms(x, bucket, False), x, bucket, 1.5)
    for dtype in (np.uint8, np.uint16):
        ranges, codes = both(device, "uniform_encode", x, bucket, dtype, *KEY, 1)
        both(device, "uniform_decode", ranges, codes, bucket)
        if x.size:
            ranges[0] = np.inf
            both(device, "uniform_decode", ranges, codes, bucket)
    signs, scales = both(device, "signs", x), cpu.qsgd_norms(x, bucket, False)
    both(device, "sign_decode", signs, scales, x.size, bucket)
    if x.size:
        scales[-1] = -1
        both(device, "sign_decode", signs, scales, x.size, bucket)


def test_sums_of_many(device):
    x = cases.random(1_050_000)
    both(device, "bucket_sums", x, x.size, True)
    both(device, "bucket_sums", x, 1_048_577, False)


@pytest.mark.parametrize("name", VALUES)
def test_natural_and_ternary(device, name):
    x = VALUES[name]
    exponents = both(device, "natural_exponents", x, *KEY, 1)
    signs = cpu.signs(x)
    both(device, "natural_decode", signs, exponents)
    if x.size:
        exponents[0] = 255
        both(device, "natural_decode", signs, exponents)
    digits = cpu.qsgd_codes(x, cpu.qsgd_norms(x, 64, False), 64, 1, *KEY, 0)
    packed = both(device, "trits_pack", digits)
    both(device, "trits_unpack", packed, x.size)
    for m in (0.0, 0.5, 1e38):
        packed = both(device, "three_lc_pack", x, m)
        both(device, "three_lc_unpack", packed, x.size, m)
        runs = both(device, "zero_runs_encode", packed)
        both(device, "zero_runs_decode", runs, packed.size)
        both(device, "zero_runs_decode", runs, packed.size + 1)
        both(device, "zero_runs_decode", runs, max(0, packed.size - 1))
    for other in (243, 255):
        if x.size:
            packed[-1] = other
            both(device, "trits_unpack", packed, x.size)


def test_zero_runs(device):
    rng = np.random.default_rng(0)
    for length in (1, 2, 13, 14, 15, 16, 28, 29, 400, 3000):
        runs = np.full(length, 121, np.uint8)
        both(device, "zero_runs_encode", runs)
        runs[rng.integers(length, size=length // 20)] = 7
        section = both(device, "zero_runs_encode", runs)
        same(both(device, "zero_runs_decode", section, length), runs)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half(device, dtype):
    from hvd_deepreduce.codec import Key
    from hvd_deepreduce.value.half import Half

    every = np.arange(2**16, dtype=np.uint32) << 16 | np.random.default_rng(0).integers(0, 2**16, 2**16, np.uint32)
    near = np.arange(0, 0x7C00, 7, np.uint16).view(np.float16).astype(np.float32)
    every = every.view(np.float32)[::9]
    floats = np.concatenate([every, near, near * np.float32(1.0003), np.float32([65504, 65519.99, 65520, 1e-8])])
    halfway = (np.arange(1, 4096, dtype=np.float64) * 2.0**-25).astype(np.float32)
    floats = np.concatenate([floats, halfway, -halfway])
    for x in (floats[np.isfinite(floats)], INPUTS["float64_beyond_float32"], INPUTS["empty"]):
        want, _ = Half(dtype=dtype).encode(x, None, Key(0, 0, 0))
        got = cuda.half_encode(device.put(x), dtype == "bfloat16")
        same(device.host(got), want)
        same(device.host(cuda.half_decode(got, x.size)), Half.decode(want, x.size, None, x.dtype, Key(0, 0, 0)))
    for words in ((0, 0x7C00), (1, 0x7F80), (2, 0), (2,)):
        with pytest.raises(ValueError):
            cuda.half_decode(device.put(np.array(words, np.uint16)).view(np.uint8), len(words) - 1)


@pytest.mark.parametrize("name", sorted(set(INDICES) - {"far"}))
@pytest.mark.parametrize("hashes, bits", [(1, 3), (10, 15), (30, 44)])
def test_bloom(device, name, hashes, bits):
    indices, numel = INDICES[name]
    if numel > 2**19:
        numel, indices = 2**14, indices[:1]
    bits = both(device, "bloom_insert", indices, max(8, indices.size * bits // 8), hashes, *KEY)
    both(device, "bloom_query", bits, hashes, numel, *KEY)
    both(device, "bloom_query", np.full(9, 255, np.uint8), hashes, 1003, *KEY)


def test_without(device):
    for name in ("one_of_one", "some", "more_than_a_tile"):
        indices, _ = INDICES[name]
        for count in {0, 1, indices.size // 3, indices.size}:
            places = some_indices(indices.size, count)
            same(device.host(cuda.without(device.put(indices), device.put(places))), np.delete(indices, places))


@pytest.mark.parametrize("gap, dtype", [(0, np.float32), (2, np.float64), (40, np.float32)])
@pytest.mark.parametrize("name", sorted(set(INDICES) - {"far"}))
def test_streams(device, name, gap, dtype):
    indices, numel = INDICES[name]
    values = np.where(indices % 5 == 1, 0, cases.random(indices.size, dtype))
    starts, lengths, covered = a = both(device, "stream_encode", indices, values, gap)
    both(device, "stream_indices", starts, lengths, covered.size)
    want = cpu.stream_nonzero(starts, lengths, covered)
    same(device.host(cuda.stream_nonzero(*map(device.put, a))), want)
    size = covered.size
    for begin, end, count in ((0, numel, size), (1, numel, size), (0, numel - 1, size), (0, 0, 1)):
        both(device, "stream_check", starts, lengths, begin, end, count)
    both(device, "stream_check", starts[::-1].copy(), lengths, 0, numel, covered.size)
    skips, ends = both(device, "stream_gaps", starts, lengths, 0)
    both(device, "stream_blocks", skips, ends, 0)
    both(device, "stream_blocks", skips, ends, 2**32 - 5)
    rng, first = np.random.default_rng(gap), int(starts[0])
    inside = [0, first, first, first + 1, numel // 2, numel // 2, numel, numel]
    for cuts in ([], inside, rng.integers(0, numel + 1, 40), starts[:9], (starts + lengths)[:9]):
        cut = np.sort(np.array(cuts, np.uint64))
        want = cpu.stream_split(starts, lengths, cut)
        got = device.host(cuda.stream_split(device.put(starts), device.put(lengths), cut))
        same(got[2:], want[2:])
        made = int(want[2][-1])
        same(tuple(part[:made] for part in got[:2]), tuple(part[:made] for part in want[:2]))
    begin = int(starts[0])
    both(device, "stream_dense", *a, begin, np.ones(numel - begin, dtype))
    both(device, "stream_add", *a, cases.random(numel, dtype))
    for seed, count in ((1, 1), (2, indices.size), (3, numel // 2 + 1)):
        at = some_indices(numel, min(count, 3000), seed)
        b = cpu.stream_encode(at, cases.random(at.size, dtype, seed), gap)
        for left, right in ((a, b), (b, a), (a, a)):
            got = cuda.stream_merge(tuple(map(device.put, left)), tuple(map(device.put, right)), gap)
            same(device.host(got), cpu.stream_merge(left, right, gap))


def test_streams_of_nothing(device):
    no, none = np.empty(0, np.uint32), np.empty(0, np.float32)
    both(device, "stream_encode", no, none, 3)
    both(device, "stream_check", no, no, 0, 10, 0)
    both(device, "stream_indices", no, no, 0)
    both(device, "stream_dense", no, no, none, 0, np.ones(5, np.float32))
    a = tuple(map(device.put, (no, no, none)))
    same(device.host(cuda.stream_merge(a, a, 2)), cpu.stream_merge((no, no, none), (no, no, none), 2))


@pytest.mark.parametrize("name", VALUES)
def test_sort(device, name):
    both(device, "sort_values", VALUES[name])


@pytest.mark.parametrize("name", sorted(set(VALUES) - {"empty"}))
@pytest.mark.parametrize("buckets", [2, 3, 16, 256, 5000])
def test_quantiles(device, name, buckets):
    for middle in (False, True):
        means, codes, _ = both(device, "quantile_encode", VALUES[name], buckets, middle)
        both(device, "quantile_encode", -np.abs(VALUES[name]), buckets, middle)
        both(device, "quantile_decode", means, codes)
    both(device, "quantile_decode", means[:-1], codes)


def test_quantiles_of_neighbouring_floats(device):
    """Values that fill buckets, and the floats next to them, which the split of such a value takes already."""
    near = np.float32(1).view(np.uint32) + np.arange(6, dtype=np.uint32)
    rng = np.random.default_rng(1)
    for counts in ([50, 1, 50, 1, 1, 1], [40, 40, 40, 1, 90, 2], [1, 1, 70, 70, 3, 70]):
        x = rng.permutation(np.repeat(near, counts).view(np.float32)) * rng.choice(np.float32([1, -1]), sum(counts))
        for buckets in (2, 5, 7, 30):
            both(device, "quantile_encode", x, buckets, False)
            both(device, "quantile_encode", np.abs(x), buckets, False)


@pytest.mark.parametrize("rows, columns", [(1, 1), (2, 37), (8, 400)])
def test_sketch(device, rows, columns):
    rng = np.random.default_rng(rows)
    for count in (0, 1, 1500):
        keys, numbers = some_indices(10**6, count), rng.integers(0, 200, count).astype(np.uint8)
        bins = both(device, "sketch_insert", keys, numbers, rows, columns, 200, *KEY)
        means = cases.random(200)
        both(device, "sketch_query", keys, bins, means, rows, columns, *KEY)
        both(device, "sketch_query", keys, bins, means[:-1], rows, columns, *KEY)
        codes = rng.integers(0, 300, count).astype(np.uint32)
        for group, groups in ((100, 3), (2, 150), (300, 1)):
            first = np.arange(groups, dtype=np.uint32) * group
            both(device, "sketch_group", keys, codes, np.arange(300, dtype=np.uint32) // group, first)
        shuffled = rng.permutation(keys)
        both(device, "sketch_merge", shuffled, cases.random(count), 10**6)
        both(device, "sketch_merge", shuffled, cases.random(count), int(keys.max(initial=1)))
        both(device, "sketch_merge", np.append(shuffled, shuffled[:1]), cases.random(count + min(count, 1)), 10**6)


@pytest.mark.parametrize("name", VALUES)
def test_fit_poly(device, name):
    ordered, _ = cpu.sort_values(VALUES[name])
    for degree, segments in ((0, None), (5, None), (1, 40), (3, 7), (15, 2)):
        section = both(device, "fit_poly_encode", ordered, degree, segments)
        both(device, "fit_poly_decode", section, ordered.size)
    for other in broken(section):
        both(device, "fit_poly_decode", other, ordered.size)


def test_fit_poly_with_many_segments(device):
    ordered, _ = cpu.sort_values(cases.random(9000) ** 3)
    both(device, "fit_poly_decode", both(device, "fit_poly_encode", ordered, 1, 600), 9000)
    wide, _ = cpu.sort_values(cases.random(3000) * np.float32(1e30))  # the heuristic asks for all there are
    both(device, "fit_poly_encode", wide, 2, None)


@pytest.mark.parametrize("name", VALUES)
def test_fit_dexp(device, name):
    for x in (VALUES[name], np.abs(VALUES[name]), -np.exp(np.linspace(-9, 3, 700)).astype(np.float32)):
        ordered, _ = cpu.sort_values(x)
        section = both(device, "fit_dexp_encode", ordered)
        both(device, "fit_dexp_decode", section, ordered.size)
    for other in broken(section):
        both(device, "fit_dexp_decode", other, ordered.size)


def streams_of_symbols():
    rng = np.random.default_rng(11)
    for count in (1, 2, 300, 1023, 1024, 1030, 2048, 33_000):
        yield rng.integers(0, 256, count).astype(np.uint8)
        yield np.minimum(rng.geometric(0.3, count), 255).astype(np.uint8)
        yield np.full(count, 201, np.uint8)
    yield np.repeat(np.arange(30, dtype=np.uint8), [min(2**k, 4000) for k in range(30)])  # lengths beyond twelve bits
    yield np.arange(256, dtype=np.uint8)


@pytest.mark.parametrize("coder", ["huffman", "rans"])
def test_symbols(device, coder):
    for symbols in streams_of_symbols():
        section = both(device, f"{coder}_encode", symbols)
        same(both(device, f"{coder}_decode", section, symbols.size), symbols)
        if symbols.size in (300, 1030, 2048):
            for other in broken(section):
                both(device, f"{coder}_decode", other, symbols.size)
            both(device, f"{coder}_decode", section, symbols.size + 1)
    both(device, f"{coder}_encode", np.empty(0, np.uint8))
    both(device, f"{coder}_decode", np.empty(0, np.uint8), 0)
    both(device, f"{coder}_decode", np.zeros(3, np.uint8), 0)


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("buckets, groups, rows", [(2, 1, 1), (40, 6, 2), (256, 8, 3)])
def test_sketch_sections(device, coded, buckets, groups, rows):
    from hvd_deepreduce.joint.minmax_sketch import HEADER, groups_of

    for x in (cases.random(1700), np.abs(cases.random(90)), VALUES["few_values"][:300], VALUES["one"]):
        indices = some_indices(30_000, x.size)
        means, codes, negative = cpu.quantile_encode(x, buckets, False)
        of_signs = [groups_of(side, means.size, groups) for side in (negative, means.size - negative)]
        header = HEADER.pack(rows, 13_107, means.size, negative, *of_signs)
        section = both(device, "sketch_encode", header, means, indices, codes, coded, *KEY)
        both(device, "sketch_decode", section, 30_000, x.size, coded, *KEY)
    both(device, "sketch_decode", section, 30_000, 2, coded, *KEY)
    both(device, "sketch_decode", section[:-1], 30_000, 1, coded, *KEY)


INTERNAL = ("function", "address", "check", "checksum", "exactly", "to_bfloat16", "contextmanager")


def test_both_backends_have_the_same_operations():
    """Each function of the CPU's that a codec may call, with the same parameters in front."""
    for name, function in inspect.getmembers(cpu, inspect.isfunction):
        if name.startswith("_") or function.__module__ != cpu.__name__ or name in INTERNAL:
            continue
        ours = list(inspect.signature(function).parameters)
        theirs = list(inspect.signature(getattr(cuda, name)).parameters)
        assert theirs[: len(ours)] == ours, name


def test_one_verdict(device):
    indices, numel = INDICES["some"]
    section = cpu.rice_encode(indices, numel)
    with cuda.one_verdict():
        got = [cuda.rice_decode(device.bytes(section), numel, indices.size) for _ in range(3)]
    for result in got:
        same(device.host(result), indices)
    reached = False
    with pytest.raises(ValueError), cuda.one_verdict():
        cuda.rice_decode(device.bytes(section), numel, indices.size)
        cuda.rice_decode(device.bytes(section[:-1]), numel, indices.size)
        reached = True
    assert reached
    with pytest.raises(ValueError):
        cuda.rice_decode(device.bytes(section[:-1]), numel, indices.size)


def test_host_only(device):
    indices, numel = INDICES["some"]
    bits = cpu.bloom_insert(indices, 400, 8, *KEY)
    positives = cpu.bloom_query(bits, 8, numel, *KEY)
    both(device, "bloom_conflict_sets", positives, indices.size, 400, 8, *KEY)
    both(device, "index_sizes", indices, numel)


@pytest.mark.parametrize("number", [0, 3, 4])
def test_a_missing_barrier_is_found(device, number, monkeypatch):
    """Without one of the barriers of the scan that most codecs share, the emulator objects. (The other three of the six
    keep a function's shared memory from its next call, and here each has another barrier in between.)"""
    if not hasattr(device.module, "EmulationError"):
        pytest.skip("only the emulator knows that threads race")
    text, barrier = cuda.source("bits.cu"), "    __syncthreads();\n"
    scans = text[text.index("T block_scan") : text.index("// ---- Bit strings")]
    assert scans.count(barrier) == 6
    parts = scans.split(barrier)
    fewer = barrier.join(parts[: number + 1]) + barrier.join(["", *parts[number + 1 :]])[len(barrier) :]
    assert fewer.count(barrier) == 5
    monkeypatch.setattr(cuda, "source", lambda _: text.replace(scans, fewer))
    monkeypatch.setattr(cuda, "_modules", {})
    monkeypatch.setattr(cuda, "_functions", {})
    indices = some_indices(90_000, 4000)
    section = device.put(cpu.bitmap_encode(indices, 90_000))
    with pytest.raises(device.module.EmulationError, match="race"):
        cuda.bitmap_decode(section, 90_000, indices.size)


@pytest.mark.parametrize("right, wrong", [
    ("lane_number() <= last ? word & SUM", "lane_number() == last ? word & SUM"),
    ("while (__any_sync(WHOLE_WARP, word < AGGREGATE))", "while (false)"),
])  # fmt: skip
def test_the_look_back_is_needed(device, right, wrong, monkeypatch):
    """Blocks that run at once do wait for each other, and find sums that are not prefixes yet."""
    if not hasattr(device.module, "EmulationError"):
        pytest.skip("a wrong kernel may do anything on a GPU")
    text = cuda.source("bits.cu")
    assert right in text
    monkeypatch.setattr(cuda, "source", lambda _: text.replace(right, wrong))
    monkeypatch.setattr(cuda, "_modules", {})
    monkeypatch.setattr(cuda, "_functions", {})
    monkeypatch.setattr(device.module, "processors", 4)
    indices = some_indices(600_000, 40_000)
    with pytest.raises((AssertionError, ValueError, device.module.EmulationError)):
        section = device.put(cpu.bitmap_encode(indices, 600_000))
        same(device.host(cuda.bitmap_decode(section, 600_000, indices.size)), indices)
