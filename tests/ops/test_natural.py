"""Natural compression, on the host and on a GPU."""

import pytest

from hvd_deepreduce.ops import natural, sign
from tests.ops.compare import KEY, VALUES, both


@pytest.mark.parametrize("name", VALUES)
def test_exponents(gpu, name):
    x = VALUES[name]
    exponents, signs = both(gpu, natural.encode, x, *KEY, 1), sign.encode(x)
    both(gpu, natural.decode, signs, exponents)
    if x.size:
        exponents[0] = 255
        assert both(gpu, natural.decode, signs, exponents) is None
