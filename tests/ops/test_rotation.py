"""Random rotation, on the host and on a GPU."""

import numpy as np
import pytest

from hvd_deepreduce.ops import rotation
from tests.ops.compare import KEY, VALUES, both


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("bucket_size", [1, 2, 64, 512, 2**31])
def test_there_and_back(gpu, name, bucket_size):
    x = VALUES[name][: 200 * bucket_size]
    rotated = both(gpu, rotation.rotate, x, bucket_size, *KEY)
    assert rotated.size == rotation.rotated_count(x.size, bucket_size)
    back = both(gpu, rotation.unrotate, rotated, x.size, bucket_size, *KEY)
    if x.size and bucket_size <= 512 and np.abs(x).max() < 1e37:
        norms = [np.linalg.norm(x[at : at + bucket_size]) for at in range(0, x.size, bucket_size)]
        assert (np.abs(back - x) <= 1e-6 * np.repeat(norms, bucket_size)[: x.size] + 1e-43).all()
