"""The containers of all ranks, decoded together by codecs that can: see conftest.py."""

import numpy as np
import pytest

from hvd_deepreduce import bundle
from hvd_deepreduce.bundle import Slice
from hvd_deepreduce.codec import RngKey
from hvd_deepreduce.config import Config
from hvd_deepreduce.container import ContainerError
from hvd_deepreduce.pipeline import Pipeline
from tests import cases, cuda_emulator
from tests.ops.conftest import ON_GPU

KEY = RngKey(3, 4, 5)
INDEX = {"rans": "rans", "bloom": {"name": "bloom", "policy": "p0"}, "bloom_p1": {"name": "bloom", "policy": "p1"}}


def made(index, density):
    return Pipeline(Config.load(sparsifier={"name": "topk", "density": density}, index=INDEX[index], value="raw"))


def gathered(pipeline, sizes, ranks):
    """The messages of all ranks, and the slices."""
    ends = np.cumsum(sizes).tolist()
    slices = [Slice(pipeline, (end - size, end), KEY) for size, end in zip(sizes, ends, strict=True)]
    sent = []
    for rank in range(ranks):
        parts = [one._replace(key=KEY._replace(rank=rank)) for one in slices]
        gradient = cases.random(sum(sizes), seed=rank)
        sent.append(bundle.encode(gradient, None, None, parts, ranks, True, lambda _: False))
    return np.concatenate(sent), slices


@pytest.mark.parametrize("index", INDEX)
@pytest.mark.parametrize(("sizes", "density", "ranks"), [([3000], 0.05, 9), ([40, 5003], 0.1, 3), ([1], 1.0, 2)])
def test_sums_are_the_cpu_s(gpu, index, sizes, density, ranks):
    data, slices = gathered(made(index, density), sizes, ranks)
    want = np.full(sum(sizes), 7, np.float32)
    own = bundle.sum_into(want, data, ranks, slices, 0.5)
    there = gpu.put(np.full_like(want, 7))
    assert bundle.sum_into(there, gpu.bytes(data), ranks, slices, 0.5) == own
    assert gpu.host(there).tobytes() == want.tobytes()


def test_parts_of_rans(gpu):
    data, slices = gathered(made("rans", 0.9), [75_000], 2)
    want, there = np.empty(75_000, np.float32), gpu.put(np.empty(75_000, np.float32))
    bundle.sum_into(want, data, 2, slices, 1.0)
    bundle.sum_into(there, gpu.bytes(data), 2, slices, 1.0)
    assert gpu.host(there).tobytes() == want.tobytes()


@pytest.mark.parametrize("index", ["rans", "bloom"])
def test_a_changed_byte_is_refused_by_its_rank(gpu, index):
    data, slices = gathered(made(index, 0.1), [300], 3)
    size = data.size // 3
    for rank, at in ((0, 3), (1, 4), (1, 6), (2, 12), (2, size // 2)):
        broken = data.copy()
        broken[rank * size + at] ^= 2
        found = []
        for out, sent in ((np.full(300, 7, np.float32), broken), (None, gpu.bytes(broken))):
            out = gpu.put(np.full(300, 7, np.float32)) if out is None else out
            with pytest.raises(ContainerError) as error:
                bundle.sum_into(out, sent, 3, slices, 1.0)
            assert (gpu.host(out) == 7).all()
            found.append(str(error.value))
        assert found[0] == found[1]


def test_a_filter_with_another_number_of_positives_is_refused(gpu):
    pipeline = made("bloom", 0.1)
    container = pipeline.encode(cases.random(300), None, KEY)
    assert container.size
    count = int(pipeline.encode(cases.random(300), None, KEY, 2)[5])
    data, slices = gathered(pipeline, [300], 1)
    assert data[5] == count  # the number of positives, a varint of one byte
    for ranks in (1, 2):
        wrong = data.copy()
        wrong[5] -= 1
        with pytest.raises(ContainerError):
            bundle.sum_into(gpu.put(np.zeros(300, np.float32)), gpu.bytes(np.tile(wrong, ranks)), ranks, slices, 1.0)


@pytest.mark.parametrize("index", ["rans", "bloom"])
def test_launches_do_not_grow_with_the_ranks(gpu, index):
    if ON_GPU:
        pytest.skip("the emulator counts launches and waits")
    counts = []
    for ranks in (2, 8):
        data, slices = gathered(made(index, 0.05), [3000], ranks)
        there, out = gpu.bytes(data), gpu.put(np.zeros(3000, np.float32))
        before = cuda_emulator.launches, cuda_emulator.waits
        bundle.sum_into(out, there, ranks, slices, 1.0)
        counts.append((cuda_emulator.launches - before[0], cuda_emulator.waits - before[1]))
    assert counts[0] == counts[1] and counts[0][1] == 3
