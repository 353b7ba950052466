"""The joint codec ``skcompress``: its differences from ``sketchml``. test_sketchml.py tests what both share."""

import numpy as np
import pytest

from hvd_deepreduce.codecs.entropy import huffman
from hvd_deepreduce.codecs.joint.skcompress import SKCompress
from hvd_deepreduce.codecs.joint.sketchml import SketchML
from tests.joint.sketches import F32, KEY, gradient, round_trip


@pytest.mark.parametrize("density", [0.01, 0.1])
def test_smaller_than_sketchml_with_the_same_values(density):
    numel = 500_000
    indices, values = gradient(numel, int(numel * density))
    section, decoded = round_trip(SKCompress(), indices, values, numel)
    plain, same = round_trip(SketchML(), indices, values, numel)
    assert (decoded == same).all()
    assert section.size < 0.85 * plain.size


def test_coded_bins_are_smaller_than_fixed_width_fields():
    """Section 4.3: a bin keeps the smallest number, so small numbers are frequent, and Huffman coding saves bytes."""
    numel = 500_000
    indices, values = gradient(numel, 50_000)
    section, _ = SKCompress().encode(indices, values, numel, KEY)
    buckets, groups = int(section[8:12].view(np.uint32)[0]), int(section[16:20].view(np.uint16).sum())
    assert (buckets, groups) == (256, 8)
    sizes = section[20 + 4 * buckets :][: 12 * groups].view(np.uint32).reshape(-1, 3)
    bins = 2 * (sizes[:, 0] // 5).sum()
    # A bin is about the smallest of five numbers below 32: the entropy of an exponential distribution with mean 6.4.
    assert 4.0 < 8 * sizes[:, 2].sum() / bins < 4.3


def test_a_dense_tensor_takes_the_bits_of_its_groups_and_bins():
    """16 buckets, as in section 7.7, and one sketch for each sign: a bit for the sign, and two fifths of the entropy of
    a bin, which is about the smallest of five numbers below 8."""
    values = gradient(200_000, 200_000)[1]
    section, decoded = round_trip(SKCompress(buckets=16, groups=1, center="middle"), None, values, values.size)
    assert 1.7 < 8 * section.size / values.size < 1.9
    assert (decoded * values >= 0).all()
    with_eight = round_trip(SKCompress(), None, values, values.size)[0]
    assert 4.5 < 8 * with_eight.size / values.size < 4.8


def test_bin_beyond_the_buckets_of_its_group_is_refused():
    indices, values = gradient(5000, 64)
    codec = SKCompress(buckets=16, groups=4, columns=1.0, rows=1)
    section, _ = codec.encode(indices, values, 5000, KEY)
    sizes = section[20 + 64 :][:48].view(np.uint32).reshape(4, 3)
    at = 20 + 64 + 48 + int(sizes[0, 1])
    bins = huffman.decode(section[at : at + int(sizes[0, 2])].copy(), int(sizes[0, 0]))
    bins[bins == bins.max()] = 4
    table = sizes.copy()
    part = huffman.encode(bins)
    table[0, 2] = part.size
    parts = [section[:84], table.reshape(-1).view(np.uint8), section[132:at], part]
    parts.append(section[at + int(sizes[0, 2]) :])
    with pytest.raises(ValueError, match="out of range"):
        codec.decode(np.concatenate(parts), 5000, 64, False, F32, KEY)
