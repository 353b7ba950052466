"""QSGD's codes and sections, on the host and on a GPU."""

import numpy as np
import pytest

from hvd_deepreduce.ops import groups, qsgd
from tests.ops.compare import KEY, VALUES, both


@pytest.mark.parametrize("name", VALUES)
def test_codes(gpu, name, bucket_size):
    x = VALUES[name][: 200 * bucket_size]
    for l2 in (False, True):
        for levels in (1, 127):
            norms, codes = both(gpu, qsgd.norms_and_codes, x, bucket_size, levels, l2, *KEY, 2)
            both(gpu, qsgd.dequantize, norms, codes, bucket_size, levels)
            both(gpu, qsgd.fit_norms, x, codes, norms, bucket_size, levels)
        both(gpu, groups.norms, x, bucket_size, l2)
        both(gpu, qsgd.quantize, x, norms * np.float32(0.5), bucket_size, 1, *KEY, 0)
    if x.size:
        for wrong in (np.nan, np.inf, -1.0):
            norms[-1] = wrong
            assert both(gpu, qsgd.dequantize, norms, codes, bucket_size, 127) is None
        norms[-1] = 1
        codes[x.size // 2] = 255
        assert both(gpu, qsgd.dequantize, norms, codes, bucket_size, 127) is None


# Buckets that one launch writes, and others that take several launches.
@pytest.mark.parametrize(
    "bits, bucket_size, l2", [(2, 64, False), (7, 32, False), (8, 512, False), (5, 10, False), (7, 64, True)]
)
def test_sections(gpu, bits, bucket_size, l2):
    header = bytes(range(8))
    for x in VALUES.values():
        section = both(gpu, qsgd.encode_section, header, x, bucket_size, bits, l2, *KEY, 1)
        assert section[:8].tobytes() == header
        codes_at = 8 + 4 * -(-x.size // bucket_size)
        norms, packed = section[8:codes_at].view(np.float32), section[codes_at:]
        values = both(gpu, qsgd.decode_section, norms, packed, x.size, bucket_size, bits)
        levels = qsgd.levels_of(bits)
        want = qsgd.dequantize(*qsgd.norms_and_codes(x, bucket_size, levels, l2, *KEY, 1), bucket_size, levels)
        assert values.tobytes() == want.tobytes()
        if x.size:
            assert both(gpu, qsgd.decode_section, norms, packed[:-1], x.size, bucket_size, bits) is None
            norms[0] = -1
            assert both(gpu, qsgd.decode_section, norms, packed, x.size, bucket_size, bits) is None
        both(gpu, qsgd.encode_section, b"four", x, bucket_size, bits, l2, *KEY, 1)
