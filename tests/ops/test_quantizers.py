"""The operations of value codecs, but for QSGD, on the host and on a GPU."""

import numpy as np
import pytest

from hvd_deepreduce.ops import (
    curve_fit,
    groups,
    half,
    lloyd,
    lossless,
    natural,
    qsgd,
    quantile,
    rotation,
    sign,
    sort,
    ternary,
    three_lc,
    uniform,
)
from tests import cases
from tests.ops.compare import INPUTS, KEY, VALUES, both, broken, same
from tests.selection import first


@pytest.mark.parametrize("name", VALUES)
def test_norms_sums_means_and_scales(gpu, name, bucket_size):
    x = VALUES[name][: 200 * bucket_size]
    both(gpu, groups.means, x, bucket_size)
    for flag in (False, True):
        both(gpu, groups.norms, x, bucket_size, flag)
        both(gpu, groups.sums, x, bucket_size, flag)
    both(gpu, groups.clip_scales, groups.norms(x, bucket_size, False), x, bucket_size, 1.5)


def test_sums_of_many_levels(gpu):
    """Buckets of more than 1024^2 values take three levels of sums."""
    x = cases.random(1_050_000)
    both(gpu, groups.sums, x, x.size, True)
    both(gpu, groups.sums, x, 1_048_577, False)


@pytest.mark.parametrize("name", VALUES)
def test_natural(gpu, name):
    x = VALUES[name]
    exponents, signs = both(gpu, natural.encode, x, *KEY, 1), sign.encode(x)
    both(gpu, natural.decode, signs, exponents)
    if x.size:
        exponents[0] = 255
        assert both(gpu, natural.decode, signs, exponents) is None


@pytest.mark.parametrize("name", VALUES)
def test_lossless(gpu, name):
    for unused in (0, 13, 16):
        x = (VALUES[name].view(np.uint32) >> unused << unused).view(np.float32)
        section = both(gpu, lossless.encode, x)
        same(both(gpu, lossless.decode, section, x.size), x)


def test_lossless_in_chunks_and_broken(gpu):
    x = np.concatenate([cases.heavy(4096), np.zeros(3000, np.float32), cases.heavy(1800)])
    section = both(gpu, lossless.encode, x)
    same(both(gpu, lossless.decode, section, x.size), x)
    for wrong in broken(section):
        both(gpu, lossless.decode, wrong, x.size)


@pytest.mark.parametrize("name", sorted(set(VALUES) - {"empty"}))
@pytest.mark.parametrize("buckets", [2, 4, 64])
def test_lloyd(gpu, name, buckets):
    x = VALUES[name]
    counts, sums = lloyd.histogram(x)
    for one, other in zip((counts, sums), lloyd.histogram(gpu.put(x)), strict=True):
        np.testing.assert_array_equal(one, other)
    for values in (x, -np.abs(x), np.abs(x)):
        means, codes = quantile.lloyd(values, buckets)
        on_gpu = quantile.lloyd(gpu.put(values), buckets)
        for want, got in zip((means, codes), on_gpu, strict=True):
            np.testing.assert_array_equal(gpu.host(got), want)
        assert means.size <= max(buckets, 2) and codes.max() < means.size
    below, above = np.uint32([0, 5]), np.uint32([0])
    assert both(gpu, lambda values: lloyd.codes(values, below, above), x).max() <= 2


@pytest.mark.parametrize("name", sorted(set(VALUES) - {"empty"}))
@pytest.mark.parametrize("buckets", first([3, 256, 2, 16, 5000], 2))
def test_quantile(gpu, name, buckets):
    for middle in (False, True):
        means, codes, _ = both(gpu, quantile.encode, VALUES[name], buckets, middle)
        both(gpu, quantile.encode, -np.abs(VALUES[name]), buckets, middle)
        both(gpu, quantile.decode, means, codes)
        ordered, codes, negative = both(gpu, quantile.encode, VALUES[name], buckets, middle, False)
        assert negative == 0 and (np.diff(ordered) >= 0).all()
    assert both(gpu, quantile.decode, ordered[:-1], codes) is None


def test_neighbouring_floats(gpu):
    """Values that fill buckets, and the floats next to them, which are splits already."""
    near = np.float32(1).view(np.uint32) + np.arange(6, dtype=np.uint32)
    rng = np.random.default_rng(1)
    for counts in ([50, 1, 50, 1, 1, 1], [40, 40, 40, 1, 90, 2], [1, 1, 70, 70, 3, 70]):
        x = rng.permutation(np.repeat(near, counts).view(np.float32)) * rng.choice(np.float32([1, -1]), sum(counts))
        for buckets in (2, 5, 7, 30):
            both(gpu, quantile.encode, x, buckets, False)
            both(gpu, quantile.encode, np.abs(x), buckets, False)
            both(gpu, quantile.encode, x, buckets, False, False)


@pytest.mark.parametrize(
    "negatives, zeros, positives", [(0, 5, 0), (3, 5, 0), (0, 5, 3), (3, 5, 3), (1, 0, 900), (900, 9, 1)]
)
def test_signs_share_the_buckets(gpu, negatives, zeros, positives):
    rng = np.random.default_rng(negatives)
    parts = [-1 - rng.random(negatives), np.zeros(zeros), 1 + rng.random(positives)]
    x = rng.permutation(np.concatenate(parts).astype(np.float32))
    for buckets in (2, 3, 4, 64):
        means, codes, negative = both(gpu, quantile.encode, x, buckets, False)
        assert means.size <= buckets and negative == (means < 0).sum()
        assert (np.sign(means[codes]) == np.sign(x)).all() or buckets == 2


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("bucket_size", [1, 2, 64, 512, 2**31])
def test_rotation(gpu, name, bucket_size):
    x = VALUES[name][: 200 * bucket_size]
    rotated = both(gpu, rotation.rotate, x, bucket_size, *KEY)
    assert rotated.size == rotation.rotated_count(x.size, bucket_size)
    back = both(gpu, rotation.unrotate, rotated, x.size, bucket_size, *KEY)
    if x.size and bucket_size <= 512 and np.abs(x).max() < 1e37:
        norms = [np.linalg.norm(x[at : at + bucket_size]) for at in range(0, x.size, bucket_size)]
        assert (np.abs(back - x) <= 1e-6 * np.repeat(norms, bucket_size)[: x.size] + 1e-43).all()


@pytest.mark.parametrize("most", [8, 2])
def test_rotation_of_long_buckets(gpu, most, monkeypatch):
    """In several launches; the last bucket is shorter than a tile, as long, or longer."""
    monkeypatch.setattr(rotation, "_NEXT", most)
    for count, bucket_size in ((20_000, 8192), (18_000, 8192), (8193, 8192), (33_000, 2**31)):
        x = cases.random(count)
        rotated = both(gpu, rotation.rotate, x, bucket_size, *KEY)
        both(gpu, rotation.unrotate, rotated, count, bucket_size, *KEY)


@pytest.mark.parametrize("name", VALUES)
def test_sign(gpu, name, bucket_size):
    x = VALUES[name][: 200 * bucket_size]
    signs, scales = both(gpu, sign.encode, x), groups.norms(x, bucket_size, False)
    both(gpu, sign.decode, signs, scales, x.size, bucket_size)
    if x.size:
        scales[-1] = -1
        assert both(gpu, sign.decode, signs, scales, x.size, bucket_size) is None


@pytest.mark.parametrize("name", VALUES)
def test_ternary(gpu, name):
    x = VALUES[name]
    digits = qsgd.quantize(x, groups.norms(x, 64, False), 64, 1, *KEY, 0)
    packed = both(gpu, ternary.pack, digits)
    both(gpu, ternary.unpack, packed, x.size)
    if x.size:
        assert both(gpu, ternary.unpack, packed[:-1], x.size) is None
        for wrong in (243, 255):
            packed[-1] = wrong
            assert both(gpu, ternary.unpack, packed, x.size) is None


@pytest.mark.parametrize("name", VALUES)
def test_three_lc(gpu, name):
    x = VALUES[name]
    for m in (0.0, 0.5, 1e38):
        packed = both(gpu, three_lc.pack, x, m)
        both(gpu, three_lc.unpack, packed, x.size, m)
        runs = both(gpu, three_lc.zero_runs_encode, packed)
        both(gpu, three_lc.zero_runs_decode, runs, packed.size)
        assert both(gpu, three_lc.zero_runs_decode, runs, packed.size + 1) is None
        if x.size:
            assert both(gpu, three_lc.zero_runs_decode, runs, packed.size - 1) is None
            assert both(gpu, three_lc.unpack, packed[:-1], x.size, m) is None
        assert both(gpu, three_lc.unpack, packed, x.size, -1.0) is None
    for wrong in (243, 255):
        if x.size:
            packed[-1] = wrong
            assert both(gpu, three_lc.unpack, packed, x.size, 0.5) is None


def test_zero_runs(gpu):
    rng = np.random.default_rng(0)
    for length in (1, 2, 13, 14, 15, 16, 28, 29, 400, 3000):
        packed = np.full(length, 121, np.uint8)
        both(gpu, three_lc.zero_runs_encode, packed)
        packed[rng.integers(length, size=length // 20)] = 7
        section = both(gpu, three_lc.zero_runs_encode, packed)
        same(both(gpu, three_lc.zero_runs_decode, section, length), packed)


@pytest.mark.parametrize("name", first(VALUES, 7))
def test_uniform(gpu, name, bucket_size):
    x = VALUES[name][: 200 * bucket_size]
    for steps in (1, 7, 255, 4095, 65535):
        ranges, codes = both(gpu, uniform.encode, x, bucket_size, steps, *KEY, 1)
        assert codes.dtype == uniform.code_dtype(steps) and codes.max(initial=0) <= steps
        both(gpu, uniform.decode, ranges, codes, bucket_size, steps)
        fitted = both(gpu, uniform.fit_ranges, x, codes, ranges, bucket_size, steps)
        both(gpu, uniform.decode, fitted, codes, bucket_size, steps)
        if x.size:
            ranges[0] = np.inf
            assert both(gpu, uniform.decode, ranges, codes, bucket_size, steps) is None


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
    wide, _ = sort.by_value(cases.random(3000) * np.float32(1e30))  # the heuristic wants more than there can be
    both(gpu, curve_fit.fit_poly_encode, wide, 2, None)


@pytest.mark.parametrize("degree, segments", [(5, 4), (1, None), (2, 1), (0, 30)])
def test_fit_poly_of_many_values(gpu, degree, segments):
    """The first segments are found by the whole device."""
    steps = np.repeat(np.float32([9, 4, 4, 0, -1, -2, -7]), [2500, 300, 900, 700, 3000, 5, 1795])  # equal distances
    for x in (cases.random(9200), np.abs(cases.random(8200)) ** 3, steps):
        ordered, _ = sort.by_value(x)
        both(gpu, curve_fit.fit_poly_encode, ordered, degree, segments)


def test_fit_dexp_of_many_values(gpu):
    """More than a block of the grid takes at a time."""
    for x in (cases.random(30_001) ** 3, np.abs(cases.random(9000))):
        both(gpu, curve_fit.fit_dexp_encode, sort.by_value(x)[0])


def test_fit_dexp_where_the_first_rates_are_worse_than_a_line(gpu):
    """The other rates are tried then."""
    rng = np.random.default_rng(0)
    uneven = [np.cumsum(rng.random(2000) ** (3 + 8 * i)) + 0.1 for i in range(6)]
    for x in (np.repeat([3, 1], 700), np.linspace(-1, 1e-3, 5000), *uneven):
        both(gpu, curve_fit.fit_dexp_encode, sort.by_value(x.astype(np.float32))[0])


@pytest.mark.parametrize("name", VALUES)
def test_fit_dexp(gpu, name):
    for x in (VALUES[name], np.abs(VALUES[name]), -np.exp(np.linspace(-9, 3, 700)).astype(np.float32)):
        ordered, _ = sort.by_value(x)
        section = both(gpu, curve_fit.fit_dexp_encode, ordered)
        both(gpu, curve_fit.fit_dexp_decode, section, ordered.size)
    for other in broken(section):
        both(gpu, curve_fit.fit_dexp_decode, other, ordered.size)


@pytest.mark.parametrize("bfloat16", [False, True])
def test_rounding_to_16_bits(gpu, bfloat16):
    every = np.arange(2**16, dtype=np.uint32) << 16 | np.random.default_rng(0).integers(0, 2**16, 2**16, np.uint32)
    every = every.view(np.float32)[::9]
    near = np.arange(0, 0x7C00, 7, np.uint16).view(np.float16).astype(np.float32)
    limits = np.float32([65504, 65519.99, 65520, 1e-8])
    halfway = (np.arange(1, 4096, dtype=np.float64) * 2.0**-25).astype(np.float32)
    floats = np.concatenate([every, near, near * np.float32(1.0003), limits, halfway, -halfway])
    for x in (floats[np.isfinite(floats)], INPUTS["float64_beyond_float32"], INPUTS["empty"]):
        section = both(gpu, half.encode, x, bfloat16)
        same(gpu.host(half.decode(gpu.put(section), x.size)), half.decode(section, x.size))
        with pytest.raises(ValueError):
            half.decode(gpu.put(section), x.size + 1)


@pytest.mark.parametrize("words", [(0, 0x7C00), (0, 0xFE00), (1, 0x7F80), (1, 0xFFC1), (2, 0), (2,), (256,)])
def test_broken_sections_of_16_bits(gpu, words):
    section = np.array(words, np.uint16).view(np.uint8)
    with pytest.raises(ValueError):
        half.decode(section, len(words) - 1)
    with pytest.raises(ValueError):
        half.decode(gpu.put(np.array(words, np.uint16)).view(np.uint8), len(words) - 1)


def test_float16_is_rounded_as_numpy_rounds_it():
    rng = np.random.default_rng(5)
    x = rng.integers(0, 2**32, 400_000, dtype=np.uint32).view(np.float32)
    x = np.concatenate([x, (rng.standard_normal(400_000) * 10.0 ** rng.uniform(-9, 5, 400_000)).astype(np.float32)])
    x = x[np.isfinite(x)]
    want = np.clip(x, -65504, 65504).astype(np.float16)
    assert half.encode(x, False)[2:].tobytes() == want.tobytes()
