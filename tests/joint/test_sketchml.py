"""The joint codec ``sketchml``, and everything that it shares with ``skcompress``."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_deepreduce.codecs.joint.skcompress import SKCompress
from hvd_deepreduce.codecs.joint.sketchml import SketchML
from hvd_deepreduce.ops import flagged_keys, quantile, sketch
from tests.cases import EQUAL
from tests.joint.sketches import F32, KEY, gradient, round_trip
from tests.oracle import delta as delta_oracle
from tests.oracle import huffman as huffman_oracle
from tests.oracle import minmax_sketch as oracle
from tests.selection import examples

WITH_FLOAT64 = {**EQUAL, "float64": np.array([1e300, -1e300, 0, 1e-300] * 9, np.float64)}
both = pytest.mark.parametrize("codec", [SketchML, SKCompress])


def expect(codec, indices, values, numel, config, dense=False):
    """Compares a round trip with the oracle: the section and the decoded values."""
    coders = {}
    if codec is SKCompress:
        coders["encode_keys"] = lambda keys, numel: delta_oracle.encode(keys)
        coders["encode_bins"] = lambda bins, width: huffman_oracle.encode(bins)
    section, decoded = round_trip(codec(**config), None if dense else indices, values, numel)
    expected, expected_values = oracle.encode(indices.tolist(), values, numel, KEY[:3], **config, **coders, dense=dense)
    assert section.tobytes() == expected
    assert decoded.tolist() == expected_values


@both
@settings(max_examples=examples(40), derandomize=True, deadline=None)
@given(data=st.data())
def test_bytes_equal_the_oracle(codec, data):
    numel = data.draw(st.sampled_from([1, 2, 257, 70_001, 2**32 - 1]))
    drawn = data.draw(st.sets(st.integers(0, numel - 1), max_size=60))
    indices = np.array(sorted(drawn), np.uint32)
    few = st.sampled_from([0.0, 1.0, -1.0, 2.0, 1e-45])
    floats = st.one_of(few, st.floats(width=32, allow_infinity=False, allow_nan=False))
    values = np.array([data.draw(floats) for _ in indices], np.float32)
    config = {
        "buckets": data.draw(st.sampled_from([2, 3, 16, 61, 256])),
        "groups": data.draw(st.sampled_from([1, 2, 3, 8])),
        "rows": data.draw(st.integers(1, 4)),
        "columns": data.draw(st.sampled_from([0.001, 0.2, 0.5, 1.3, 4.0])),
        "center": data.draw(st.sampled_from(["mean", "middle"])),
    }
    expect(codec, indices, values, numel, config)


@both
def test_bytes_of_many_elements_equal_the_oracle(codec):
    config = {"buckets": 64, "groups": 8, "rows": 2, "columns": 0.2, "center": "mean"}
    expect(codec, *gradient(100_003, 1500), 100_003, config)


@both
@pytest.mark.parametrize("groups", [1, 3, 8])
@pytest.mark.parametrize("buckets", [16, 61])
def test_bytes_of_a_dense_tensor_equal_the_oracle(codec, groups, buckets):
    """Section 7.7 of SKCompress: no keys."""
    _, values = gradient(2000, 2000)
    values[::9] = 0
    config = {"buckets": buckets, "groups": groups, "rows": 2, "columns": 0.2, "center": "middle"}
    expect(codec, np.arange(2000), values, 2000, config, dense=True)


@both
def test_as_many_groups_as_possible_without_keys(codec):
    """The signs' shares of 256 groups, 127.5 and 128.5, are both rounded up."""
    values = np.concatenate([-1 - np.arange(1020), 1 + np.arange(1028)]).astype(np.float32)
    settings = codec(buckets=2048, groups=256, columns=4.0, rows=8)
    section, decoded = round_trip(settings, None, values, values.size)
    assert np.abs(decoded - values).max() < 8
    header = sketch.Header.of(section)
    assert header.form == 1 and header.groups == 257


@both
def test_broken_sections_without_keys_are_refused(codec):
    _, values = gradient(400, 400)
    section, _ = codec(buckets=40, groups=5).encode(None, values, 400, KEY)
    tables = 20 + 4 * 40
    for at, change, message in (
        (1, 2, "byte after its number of rows"),
        (2, 1, "byte after its number of rows"),
        (tables, 1, "sizes of its groups"),
        (tables + 4, 1, "sizes of its groups"),
        (tables + 8, 1, None),
    ):
        broken = section.copy()
        broken[at] += np.uint8(change)
        with pytest.raises(ValueError, match=message):
            codec.decode(broken, 400, 400, True, F32, KEY)
    with pytest.raises(ValueError, match="byte after its number of rows"):
        codec.decode(section, 500, 400, False, F32, KEY)


@both
@pytest.mark.parametrize("groups", [1, 8, 100])
def test_magnitudes_only_decrease_and_stay_within_their_group(codec, groups):
    numel = 200_003
    indices, values = gradient(numel, 20_000)
    values[::50] = 0  # zeros have one bucket, the first of the first group of the other sign
    _, decoded = round_trip(codec(groups=groups), indices, values, numel)
    means, codes, negative = quantile.encode(values, 256, False)
    assert not (decoded * np.sign(values) < 0).any()
    assert (np.abs(decoded) <= np.abs(means[codes])).all()
    for side, of_side, before in ((means[:negative], values < 0, 0), (means[negative:], values >= 0, negative)):
        sent = codes[of_side].astype(np.int64) - before
        found = np.searchsorted(np.abs(side), np.abs(decoded[of_side]))
        assert (np.abs(side)[found] == np.abs(decoded[of_side])).all()
        assert (found <= sent).all()
        assert (sent - found < max(1, -(-side.size // max(1, round(groups * side.size / 256))))).all()
        assert (found < sent).any()


@pytest.mark.parametrize(("rows", "columns"), [(1, 0.2), (2, 0.2), (3, 0.5), (2, 1.0), (1, 4.0)])
def test_correctness_rate_equals_equation_2(rows, columns):
    """Equality holds in equation 2 if all numbers differ: 256 keys with 256 numbers, in many small sketches."""
    v = 256
    t = int(v * columns)
    rank = np.arange(1, v + 1)
    expected = np.mean(1 - (1 - (1 - 1 / t) ** (v - rank)) ** rows)
    random = np.random.default_rng(7)
    right = []
    for step in range(150):
        keys = np.sort(random.choice(10**6, v, replace=False)).astype(np.uint32)
        numbers = random.permutation(v).astype(np.uint8)
        bins = sketch.insert(keys, numbers, rows, t, v, 1, 2, step)
        found = sketch.query(keys, bins, np.arange(v, dtype=np.float32), rows, t, 1, 2, step)
        assert (found <= numbers).all()
        right.append(np.mean(found == numbers))
    assert abs(np.mean(right) - expected) < 4 * np.std(right) / np.sqrt(len(right)) + 1e-3


@both
def test_correctness_rate_of_a_gradient_is_at_least_equation_2(codec):
    numel = 400_000
    indices, values = gradient(numel, 40_000)
    _, decoded = round_trip(codec(), indices, values, numel)
    means, codes, _ = quantile.encode(values, 256, False)
    v, t = 5000, 1000
    bound = np.mean(1 - (1 - (1 - 1 / t) ** (v - np.arange(1, v + 1))) ** 2)
    rate = np.mean(decoded == means[codes])
    assert bound - 0.01 < rate < bound + 0.05


@both
@pytest.mark.parametrize("values", WITH_FLOAT64.values(), ids=WITH_FLOAT64)
@pytest.mark.parametrize("dense", [False, True])
def test_awkward_values(codec, values, dense):
    numel = values.size if dense else 2**32 - 1
    indices = None if dense else (2**32 - 2 - 977 * np.arange(values.size)[::-1]).astype(np.uint32)
    _, decoded = round_trip(codec(), indices, values, numel)
    if values.dtype == np.float32:
        assert (decoded == values).all()
    else:
        assert not (decoded * np.sign(values) < 0).any()


@both
def test_wide_values(codec):
    indices, values = gradient(10_007, 5000)
    values = (values * np.float32(10.0) ** np.linspace(-37, 35, 5000)).astype(np.float32)
    _, decoded = round_trip(codec(groups=32, columns=1.0), indices, values, 10_007)
    assert (np.sign(decoded) == np.sign(values)).all()
    assert np.abs(decoded).max() <= np.abs(values).max()


@both
def test_largest_number_of_buckets(codec):
    indices, values = gradient(300_000, 100_000)
    _, decoded = round_trip(codec(buckets=65536, groups=256, columns=4.0, rows=8), indices, values, 300_000)
    assert np.linalg.norm(decoded - values) < 0.05 * np.linalg.norm(values)


@settings(max_examples=examples(40), derandomize=True, deadline=None)
@given(st.sets(st.one_of(st.integers(0, 300), st.integers(0, 2**32 - 2)), max_size=50))
def test_flagged_keys(drawn):
    keys = np.array(sorted(drawn), np.uint32)
    section = flagged_keys.encode(keys)
    assert section.tobytes() == oracle.flagged(keys.tolist())
    assert (flagged_keys.decode(section, 2**32 - 1, keys.size) == keys).all()
    if keys.size:
        with pytest.raises(ValueError, match="index"):
            flagged_keys.decode(section, int(keys[-1]), keys.size)


def test_flagged_keys_with_superfluous_bytes_are_refused():
    with pytest.raises(ValueError, match="index"):
        flagged_keys.decode(np.array([1, 5, 0], np.uint8), 100, 1)


@both
def test_a_key_in_two_groups_is_refused(codec):
    """A section with two groups of one key each. The broken section has the same key in both groups."""
    indices, values = np.array([5, 9], np.uint32), np.array([-1, 1], np.float32)
    section, _ = codec().encode(indices, values, 100, KEY)
    other, _ = codec().encode(np.array([9, 5], np.uint32), values, 100, KEY)
    differs = np.flatnonzero(section != other)
    broken = section.copy()
    broken[differs[0]] = other[differs[0]]  # changes only the key of the first group
    with pytest.raises(ValueError, match="out of order"):
        codec.decode(broken, 100, 2, False, F32, KEY)
