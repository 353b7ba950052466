"""Signs, on the host and on a GPU."""

import pytest

from hvd_deepreduce.ops import groups, sign
from tests.ops.compare import VALUES, both


@pytest.mark.parametrize("name", VALUES)
def test_signs_and_scales(gpu, name, bucket_size):
    x = VALUES[name][: 200 * bucket_size]
    signs, scales = both(gpu, sign.encode, x), groups.norms(x, bucket_size, False)
    both(gpu, sign.decode, signs, scales, x.size, bucket_size)
    if x.size:
        scales[-1] = -1
        assert both(gpu, sign.decode, signs, scales, x.size, bucket_size) is None
