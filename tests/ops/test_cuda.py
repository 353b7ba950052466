"""Every operation gives the same bytes on the host and on a GPU, for awkward inputs; see conftest.py for the GPU."""

import numpy as np
import pytest

from hvd_deepreduce.ops import (
    buckets,
    curve_fit,
    densestream,
    half,
    natural,
    qsgd,
    quantile,
    sign,
    sketch,
    sort,
    ternary,
    uniform,
)
from tests import cases
from tests.ops.compare import INDICES, INPUTS, KEY, VALUES, both, broken, same, some_indices

BUCKETS = [1, 6, 512, 6000, 2**31]


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("bucket", BUCKETS)
def test_qsgd(gpu, name, bucket):
    x = VALUES[name][: 200 * bucket]
    for l2 in (False, True):
        for levels in (1, 127):
            norms, codes = both(gpu, qsgd.norms_and_codes, x, bucket, levels, l2, *KEY, 2)
            both(gpu, qsgd.dequantize, norms, codes, bucket, levels)
        both(gpu, qsgd.bucket_norms, x, bucket, l2)
        both(gpu, qsgd.quantize, x, norms * np.float32(0.5), bucket, 1, *KEY, 0)
    if x.size:
        for wrong in (np.nan, np.inf, -1.0):
            norms[-1] = wrong
            both(gpu, qsgd.dequantize, norms, codes, bucket, 127)
        norms[-1] = 1
        codes[x.size // 2] = 255
        both(gpu, qsgd.dequantize, norms, codes, bucket, 127)


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("bucket", BUCKETS)
def test_other_quantizers(gpu, name, bucket):
    x = VALUES[name][: 200 * bucket]
    for squares in (False, True):
        both(gpu, buckets.bucket_sums, x, bucket, squares)
        both(gpu, buckets.bucket_means, x, bucket)
        both(gpu, buckets.clip_scales, qsgd.bucket_norms(x, bucket, False), x, bucket, 1.5)
    for dtype in (np.uint8, np.uint16):
        ranges, codes = both(gpu, uniform.encode, x, bucket, dtype, *KEY, 1)
        both(gpu, uniform.decode, ranges, codes, bucket)
        if x.size:
            ranges[0] = np.inf
            both(gpu, uniform.decode, ranges, codes, bucket)
    signs, scales = both(gpu, sign.encode, x), qsgd.bucket_norms(x, bucket, False)
    both(gpu, sign.decode, signs, scales, x.size, bucket)
    if x.size:
        scales[-1] = -1
        both(gpu, sign.decode, signs, scales, x.size, bucket)


def test_sums_of_many(gpu):
    x = cases.random(1_050_000)
    both(gpu, buckets.bucket_sums, x, x.size, True)
    both(gpu, buckets.bucket_sums, x, 1_048_577, False)


@pytest.mark.parametrize("name", VALUES)
def test_natural_and_ternary(gpu, name):
    x = VALUES[name]
    exponents = both(gpu, natural.encode, x, *KEY, 1)
    signs = sign.encode(x)
    both(gpu, natural.decode, signs, exponents)
    if x.size:
        exponents[0] = 255
        both(gpu, natural.decode, signs, exponents)
    digits = qsgd.quantize(x, qsgd.bucket_norms(x, 64, False), 64, 1, *KEY, 0)
    packed = both(gpu, ternary.trits_pack, digits)
    both(gpu, ternary.trits_unpack, packed, x.size)
    for m in (0.0, 0.5, 1e38):
        packed = both(gpu, ternary.three_lc_pack, x, m)
        both(gpu, ternary.three_lc_unpack, packed, x.size, m)
        runs = both(gpu, ternary.zero_runs_encode, packed)
        both(gpu, ternary.zero_runs_decode, runs, packed.size)
        both(gpu, ternary.zero_runs_decode, runs, packed.size + 1)
        both(gpu, ternary.zero_runs_decode, runs, max(0, packed.size - 1))
    for other in (243, 255):
        if x.size:
            packed[-1] = other
            both(gpu, ternary.trits_unpack, packed, x.size)


def test_zero_runs(gpu):
    rng = np.random.default_rng(0)
    for length in (1, 2, 13, 14, 15, 16, 28, 29, 400, 3000):
        runs = np.full(length, 121, np.uint8)
        both(gpu, ternary.zero_runs_encode, runs)
        runs[rng.integers(length, size=length // 20)] = 7
        section = both(gpu, ternary.zero_runs_encode, runs)
        same(both(gpu, ternary.zero_runs_decode, section, length), runs)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half(gpu, dtype):
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
        got = half.encode(gpu.put(x), dtype == "bfloat16")
        same(gpu.host(got), want)
        same(gpu.host(half.decode(got, x.size)), Half.decode(want, x.size, None, x.dtype, Key(0, 0, 0)))
    for words in ((0, 0x7C00), (1, 0x7F80), (2, 0), (2,)):
        with pytest.raises(ValueError):
            half.decode(gpu.put(np.array(words, np.uint16)).view(np.uint8), len(words) - 1)


@pytest.mark.parametrize("gap, dtype", [(0, np.float32), (2, np.float64), (40, np.float32)])
@pytest.mark.parametrize("name", sorted(set(INDICES) - {"far"}))
def test_streams(gpu, name, gap, dtype):
    indices, numel = INDICES[name]
    values = np.where(indices % 5 == 1, 0, cases.random(indices.size, dtype))
    starts, lengths, covered = a = both(gpu, densestream.encode, indices, values, gap)
    both(gpu, densestream.indices, starts, lengths, covered.size)
    want = densestream.nonzero(starts, lengths, covered)
    same(gpu.host(densestream.nonzero(*map(gpu.put, a))), want)
    size = covered.size
    for begin, end, count in ((0, numel, size), (1, numel, size), (0, numel - 1, size), (0, 0, 1)):
        both(gpu, densestream.check_blocks, starts, lengths, begin, end, count)
    both(gpu, densestream.check_blocks, starts[::-1].copy(), lengths, 0, numel, covered.size)
    skips, ends = both(gpu, densestream.gaps, starts, lengths, 0)
    both(gpu, densestream.blocks_of_gaps, skips, ends, 0)
    both(gpu, densestream.blocks_of_gaps, skips, ends, 2**32 - 5)
    rng, first = np.random.default_rng(gap), int(starts[0])
    inside = [0, first, first, first + 1, numel // 2, numel // 2, numel, numel]
    for cuts in ([], inside, rng.integers(0, numel + 1, 40), starts[:9], (starts + lengths)[:9]):
        cut = np.sort(np.array(cuts, np.uint64))
        want = densestream.split(starts, lengths, cut)
        got = gpu.host(densestream.split(gpu.put(starts), gpu.put(lengths), cut))
        same(got[2:], want[2:])
        made = int(want[2][-1])
        same(tuple(part[:made] for part in got[:2]), tuple(part[:made] for part in want[:2]))
    begin = int(starts[0])
    both(gpu, densestream.to_dense, *a, begin, np.ones(numel - begin, dtype))
    both(gpu, densestream.add_to, *a, cases.random(numel, dtype))
    for seed, count in ((1, 1), (2, indices.size), (3, numel // 2 + 1)):
        at = some_indices(numel, min(count, 3000), seed)
        b = densestream.encode(at, cases.random(at.size, dtype, seed), gap)
        for left, right in ((a, b), (b, a), (a, a)):
            got = densestream.merge(tuple(map(gpu.put, left)), tuple(map(gpu.put, right)), gap)
            same(gpu.host(got), densestream.merge(left, right, gap))


def test_streams_of_nothing(gpu):
    no, none = np.empty(0, np.uint32), np.empty(0, np.float32)
    both(gpu, densestream.encode, no, none, 3)
    both(gpu, densestream.check_blocks, no, no, 0, 10, 0)
    both(gpu, densestream.indices, no, no, 0)
    both(gpu, densestream.to_dense, no, no, none, 0, np.ones(5, np.float32))
    a = tuple(map(gpu.put, (no, no, none)))
    same(gpu.host(densestream.merge(a, a, 2)), densestream.merge((no, no, none), (no, no, none), 2))


@pytest.mark.parametrize("name", sorted(set(VALUES) - {"empty"}))
@pytest.mark.parametrize("buckets", [2, 3, 16, 256, 5000])
def test_quantiles(gpu, name, buckets):
    for middle in (False, True):
        means, codes, _ = both(gpu, quantile.encode, VALUES[name], buckets, middle)
        both(gpu, quantile.encode, -np.abs(VALUES[name]), buckets, middle)
        both(gpu, quantile.decode, means, codes)
    both(gpu, quantile.decode, means[:-1], codes)


def test_quantiles_of_neighbouring_floats(gpu):
    """Values that fill buckets, and the floats next to them, which the split of such a value takes already."""
    near = np.float32(1).view(np.uint32) + np.arange(6, dtype=np.uint32)
    rng = np.random.default_rng(1)
    for counts in ([50, 1, 50, 1, 1, 1], [40, 40, 40, 1, 90, 2], [1, 1, 70, 70, 3, 70]):
        x = rng.permutation(np.repeat(near, counts).view(np.float32)) * rng.choice(np.float32([1, -1]), sum(counts))
        for most in (2, 5, 7, 30):
            both(gpu, quantile.encode, x, most, False)
            both(gpu, quantile.encode, np.abs(x), most, False)


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
        both(gpu, sketch.merge, shuffled, cases.random(count), 10**6)
        both(gpu, sketch.merge, shuffled, cases.random(count), int(keys.max(initial=1)))
        both(gpu, sketch.merge, np.append(shuffled, shuffled[:1]), cases.random(count + min(count, 1)), 10**6)


@pytest.mark.parametrize("name", VALUES)
def test_fit_poly(gpu, name):
    ordered, _ = sort.by_value(VALUES[name])
    for degree, segments in ((0, None), (5, None), (1, 40), (3, 7), (15, 2)):
        section = both(gpu, curve_fit.fit_poly_encode, ordered, degree, segments)
        both(gpu, curve_fit.fit_poly_decode, section, ordered.size)
    for other in broken(section):
        both(gpu, curve_fit.fit_poly_decode, other, ordered.size)


def test_fit_poly_with_many_segments(gpu):
    ordered, _ = sort.by_value(cases.random(9000) ** 3)
    both(gpu, curve_fit.fit_poly_decode, both(gpu, curve_fit.fit_poly_encode, ordered, 1, 600), 9000)
    wide, _ = sort.by_value(cases.random(3000) * np.float32(1e30))  # the heuristic asks for all there are
    both(gpu, curve_fit.fit_poly_encode, wide, 2, None)


@pytest.mark.parametrize("name", VALUES)
def test_fit_dexp(gpu, name):
    for x in (VALUES[name], np.abs(VALUES[name]), -np.exp(np.linspace(-9, 3, 700)).astype(np.float32)):
        ordered, _ = sort.by_value(x)
        section = both(gpu, curve_fit.fit_dexp_encode, ordered)
        both(gpu, curve_fit.fit_dexp_decode, section, ordered.size)
    for other in broken(section):
        both(gpu, curve_fit.fit_dexp_decode, other, ordered.size)


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("buckets, groups, rows", [(2, 1, 1), (40, 6, 2), (256, 8, 3)])
def test_sketch_sections(gpu, coded, buckets, groups, rows):
    from hvd_deepreduce.joint.minmax_sketch import HEADER, groups_of

    for x in (cases.random(1700), np.abs(cases.random(90)), VALUES["few_values"][:300], VALUES["one"]):
        indices = some_indices(30_000, x.size)
        means, codes, negative = quantile.encode(x, buckets, False)
        of_signs = [groups_of(side, means.size, groups) for side in (negative, means.size - negative)]
        header = HEADER.pack(rows, 13_107, means.size, negative, *of_signs)
        section = both(gpu, sketch.encode, header, means, indices, codes, coded, *KEY)
        both(gpu, sketch.decode, section, 30_000, x.size, coded, *KEY)
    both(gpu, sketch.decode, section, 30_000, 2, coded, *KEY)
    both(gpu, sketch.decode, section[:-1], 30_000, 1, coded, *KEY)


QSGD_SECTIONS = [(2, 64, False), (7, 32, False), (8, 512, False), (5, 10, False), (7, 64, True)]


@pytest.mark.parametrize("bits, bucket, l2", QSGD_SECTIONS)
def test_qsgd_sections(gpu, bits, bucket, l2):
    """Buckets that one launch writes, and such that take several launches."""
    header = bytes(range(8))
    for x in VALUES.values():
        section = both(gpu, qsgd.encode_section, header, x, bucket, bits, l2, *KEY, 1)
        begin = 8 + 4 * -(-x.size // bucket)
        norms, packed = section[8:begin].view(np.float32), section[begin:]
        both(gpu, qsgd.decode_section, norms, packed, x.size, bucket, bits)
        both(gpu, qsgd.decode_section, norms, packed[:-1], x.size, bucket, bits)
