"""The index codec ``auto``."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_deepreduce.codecs.index.auto import CHOICES, Auto
from hvd_deepreduce.codecs.interfaces import RngKey
from tests.cases import some_indices
from tests.index.test_lossless import clustered

KEY = RngKey(1, 2, 3)


def sizes(kept, numel):
    return {codec.name: codec.encode(kept, numel, KEY)[0].size for codec in CHOICES}


@given(st.data())
def test_chooses_the_smallest_codec_for_few_indices(data):
    numel = data.draw(st.one_of(st.integers(1, 300), st.integers(1, 2**32 - 1)))
    kept = np.array(sorted(data.draw(st.sets(st.integers(0, numel - 1), min_size=1, max_size=60))), np.uint32)
    chosen = Auto().resolve(kept, numel)
    # The size of rANS is estimated, with an error of a few bytes. Bitmaps of huge tensors are too large to encode here.
    measured = [codec for codec in CHOICES if codec.name != "bitmap" or numel < 1 << 20]
    least = min(codec.encode(kept, numel, KEY)[0].size for codec in measured)
    section, support = chosen.encode(kept, numel, KEY)
    assert section.size <= least + 4
    np.testing.assert_array_equal(chosen.decode(section, numel, kept.size, KEY), support)


CASES = {
    "layer": (some_indices(36864, 368), 36864, {"rice"}),
    "one_percent": (some_indices(1 << 23, 1 << 16), 1 << 23, {"rans"}),
    # A Rice code without low bits is a bitmap.
    "half": (some_indices(100_003, 50_000), 100_003, {"bitmap", "rice", "rans"}),
    "clustered": (clustered(2_000_003, 0.02), 2_000_003, {"rans"}),
    "runs": (np.concatenate([np.arange(at, at + 900) for at in range(0, 1 << 20, 65536)]), 1 << 20, {"rle"}),
    "all": (np.arange(30000), 30000, {"elias_fano", "rle", "rans"}),
    "two": (np.array([5, 6]), 7, {"bitmap", "packed"}),
}


@pytest.mark.parametrize(("kept", "numel", "names"), CASES.values(), ids=CASES)
def test_chosen_codec_is_within_two_percent_of_the_smallest(kept, numel, names):
    kept = kept.astype(np.uint32)
    chosen = Auto().resolve(kept, numel)
    of = sizes(kept, numel)
    assert of[chosen.name] <= 1.02 * min(of.values()) + 4, (chosen.name, of)
    assert chosen.name in names, (chosen.name, of)


def test_decoder_of_auto_raises():
    kept = np.array([1, 5], np.uint32)
    section, support = Auto().encode(kept, 9, KEY)
    assert support is kept
    with pytest.raises(ValueError, match="only chooses"):
        Auto.decode(section, 9, 2, KEY)
