"""Fields of equal width, and the checks of index lists, agree on the host and on a GPU."""

import numpy as np
import pytest

from hvd_deepreduce.ops import bits
from tests.ops.compare import both


@pytest.mark.parametrize("width", [0, 1, 2, 3, 5, 7, 8, 13, 25, 31, 32])
def test_pack(gpu, width):
    for count in (0, 1, 7, 1000):
        fields = np.random.default_rng(count).integers(0, 2**width, count).astype(np.uint32)
        section = both(gpu, bits.pack, fields, width)
        both(gpu, bits.unpack, section, count, width, np.uint32)
        if width <= 8:
            both(gpu, bits.pack, fields.astype(np.uint8), width)
            both(gpu, bits.unpack, section, count, width, np.uint8)
        both(gpu, bits.unpack, section[:-1], count, width, np.uint32)


def test_arrays_in_a_mapped_file_are_on_the_host(tmp_path):
    fields = np.arange(7, dtype=np.uint32)
    mapped = np.memmap(tmp_path / "fields", np.uint32, "w+", shape=7)
    mapped[:] = fields
    assert bits.pack(mapped, 3).tobytes() == bits.pack(fields, 3).tobytes()


def test_check_indices(gpu):
    for indices in ([], [0], [3, 4, 9], [3, 3], [4, 3], [9, 10]):
        both(gpu, bits.check_indices, np.array(indices, np.uint32), 10)


@pytest.mark.parametrize("numel", [0, 1, 33, 5003])
def test_check_order(gpu, numel):
    """Permutations, and lists that nearly are."""
    order = np.random.default_rng(3).permutation(numel).astype(np.uint32)
    both(gpu, bits.check_order, order)
    for at, value in ((0, numel), (numel - 1, 2**32 - 1), (0, order[-1])) if numel else ():
        wrong = order.copy()
        wrong[at] = value
        both(gpu, bits.check_order, wrong)
