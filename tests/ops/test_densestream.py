"""DenseStream's blocks and sums, on the host and on a GPU."""

from struct import Struct

import numpy as np
import pytest

from hvd_deepreduce.ops import densestream, stream_exchange
from tests import cases
from tests.ops.compare import INDICES, both, same


@pytest.mark.parametrize("gap, dtype", [(0, np.float32), (2, np.float64), (40, np.float32)])
@pytest.mark.parametrize("name", sorted(set(INDICES) - {"far"}))
def test_streams(gpu, name, gap, dtype):
    indices, numel = INDICES[name]
    values = np.where(indices % 5 == 1, 0, cases.random(indices.size, dtype))
    starts, lengths, covered = a = both(gpu, densestream.encode, indices, values, gap)
    support = both(gpu, densestream.indices, starts, lengths, covered.size)
    same(both(gpu, densestream.cover, indices, gap), (starts, lengths, support))
    size = covered.size
    for begin, end, count in ((0, numel, size), (1, numel, size), (0, numel - 1, size), (0, 0, 1)):
        both(gpu, densestream.check_blocks, starts, lengths, begin, end, count)
    both(gpu, densestream.check_blocks, starts[::-1].copy(), lengths, 0, numel, covered.size)
    skips, ends = both(gpu, densestream.gaps, starts, lengths, 0)
    both(gpu, densestream.blocks_of_gaps, skips, ends, 0)
    both(gpu, densestream.blocks_of_gaps, skips, ends, 2**32 - 5)
    begin = int(starts[0])
    both(gpu, densestream.to_dense, *a, begin, np.ones(numel - begin, dtype))
    both(gpu, densestream.add_to, *a, cases.random(numel, dtype))


@pytest.mark.parametrize("gap", [0, 40])
@pytest.mark.parametrize("name", sorted(set(INDICES) - {"far"}))
def test_coded_streams(gpu, name, gap):
    indices, numel = INDICES[name]
    starts, lengths, values = densestream.encode(indices, cases.random(indices.size, np.float32), gap)
    sizes = Struct("<QQ24x")
    own = values.view(np.uint8), values.size, 0, numel
    section = stream_exchange.pack_coded(sizes.pack, starts, lengths, *own)
    got = stream_exchange.pack_coded(sizes.pack, gpu.put(starts), gpu.put(lengths), gpu.bytes(own[0]), *own[1:])
    same(gpu.host(got), section)
    a_size, b_size = sizes.unpack(section[:40])
    b_at = 40 + -(-a_size // 8) * 8
    a, b = section[40 : 40 + a_size], section[b_at : b_at + b_size]
    found = both(gpu, stream_exchange.unpack_coded, a, b, starts.size, 0, numel, values.size)
    same(found, (starts, lengths))
    end = int(starts[-1]) + int(lengths[-1])
    for broken in ((starts.size, 0, end - 1, values.size), (starts.size, 0, numel, values.size + 1),
                   (starts.size + 1, 0, numel, values.size)):  # fmt: skip
        assert both(gpu, stream_exchange.unpack_coded, a, b, *broken) is None
    assert both(gpu, stream_exchange.unpack_coded, a[:1], b, starts.size, 0, numel, values.size) is None


def test_streams_of_nothing(gpu):
    no, none = np.empty(0, np.uint32), np.empty(0, np.float32)
    both(gpu, densestream.encode, no, none, 3)
    both(gpu, densestream.cover, no, 3)
    both(gpu, densestream.check_blocks, no, no, 0, 10, 0)
    one, two = np.uint32([1]), np.uint32([1, 2])
    for starts, lengths in ((one, no), (no, one), (two, one), (one, two)):  # not as many of both
        assert both(gpu, densestream.check_blocks, starts, lengths, 0, 10, 1) is None
    both(gpu, densestream.indices, no, no, 0)
    both(gpu, densestream.to_dense, no, no, none, 0, np.ones(5, np.float32))
