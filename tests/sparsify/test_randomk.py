"""The sparsifier ``randomk``, and the random numbers that it uses. test_oracles.py has what all sparsifiers must do."""

import numpy as np
import pytest

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.sparsify.randomk import RandomK
from hvd_deepreduce.ops import random
from tests.oracle import philox
from tests.oracle import randomk as oracle


def test_philox_known_answers():
    """Test vectors of the authors' own library (Random123, kat_vectors, philox4x32 10)."""
    ones = 0xFFFFFFFF
    assert philox.philox4x32((0, 0), (0, 0, 0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox.philox4x32((ones, ones), (ones,) * 4) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    assert philox.philox4x32(
        (0xA4093822, 0x299F31D0), (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    ) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)  # fmt: skip


@pytest.mark.parametrize("domain", [1, 2, 3, 4, 5, 16, 17, 64, 100, 257])
def test_permutation_of_the_oracle_is_a_bijection(domain):
    assert sorted(philox.permute(i, domain, 5, 6, 7) for i in range(domain)) == list(range(domain))


@pytest.mark.parametrize(
    ("numel", "count"), [(2**32 - 1, 1000), (70_001, 1093), (70_001, 1094), (4097, 3000), (600, 600), (600, 0)]
)
def test_of_many_elements(numel, count):
    found = random.indices(numel, count, 1, 2, 3, None)
    assert found.dtype == np.uint32 and found.tolist() == oracle.indices_of(numel, count, 1, 2, 3)


def test_receivers_and_all_ranks_repeat_the_selection():
    indices, _ = RandomK(density=0.05).select(np.ones(1000), None, RngKey(1, 2, 3, rank=0), 1)
    np.testing.assert_array_equal(RandomK.indices_of(1000, 50, RngKey(1, 2, 3, rank=7)), indices)
    for other in (RngKey(2, 2, 3), RngKey(1, 3, 3), RngKey(1, 2, 4)):
        assert RandomK.indices_of(1000, 50, other).tolist() != indices.tolist()


def test_all_elements_are_equally_likely():
    steps, numel, count = 4000, 200, 20
    hits = np.zeros(numel)
    for step in range(steps):
        hits[RandomK.indices_of(numel, count, RngKey(3, 1, step))] += 1
    expected = steps * count / numel
    deviations = (hits - expected) / np.sqrt(expected * (1 - count / numel))
    assert np.abs(deviations).max() < 4.5 and 0.75 < np.mean(deviations**2) < 1.25
