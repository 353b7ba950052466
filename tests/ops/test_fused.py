"""Decoding the containers of all ranks in one set of launches: see conftest.py."""

import numpy as np
import pytest

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.config import Config
from hvd_deepreduce.ops import deferred, fused
from hvd_deepreduce.pipeline import Pipeline, bundle
from hvd_deepreduce.pipeline.bundle import Slice
from hvd_deepreduce.wire import frame
from hvd_deepreduce.wire.standalone import ContainerError
from tests import cases, cuda_emulator
from tests.ops.conftest import ON_GPU

KEY = RngKey(3, 4, 5)


def made(density=0.05, index="rice", **value):
    value = {"name": "qsgd", "fit_scale": False} | value
    return Pipeline(Config.load(sparsifier={"name": "topk", "density": density}, index=index, value=value))


def slices(pipeline, sizes):
    ends = np.cumsum(sizes).tolist()
    return [
        Slice(pipeline, (end - size, end), KEY._replace(parameter=number))
        for number, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]


def gathered(pipeline, sizes, ranks):
    sent = []
    for rank in range(ranks):
        parts = [one._replace(key=one.key._replace(rank=rank)) for one in slices(pipeline, sizes)]
        gradient = cases.random(sum(sizes), seed=rank)
        sent.append(bundle.encode(gradient, None, None, parts, ranks, True))
    return np.concatenate(sent)


def by_hand(gpu, pipeline, data, out, sizes, ranks):
    """What the call itself returns, without the composed way behind it."""
    there, shared, rows = gpu.put(out), pipeline.shared, []
    for one in slices(pipeline, sizes):
        begin, end = one.part
        rows.append((begin, end, frame.salt(shared.digest, end - begin, out.dtype, one.key)))
    value = pipeline.config.value
    form = frame.SPARSE | 1
    blocks = pipeline.config.index.name == "rice_blocks"
    settings = np.array([(form, value.bits, value.bucket_size, value.norm == "l2", blocks)], fused.SETTINGS)
    with deferred.reading(there):
        own = fused.decode(gpu.bytes(data), ranks, np.array(rows, fused.TENSOR), settings, there, 0.5, KEY.rank)
    return own, gpu.host(there)


@pytest.mark.parametrize("sizes", [[1], [3000], [40, 700, 5003], [30_000]])
@pytest.mark.parametrize(
    ("density", "value"),
    [(0.05, {}), (0.001, {"bits": 2, "bucket_size": 1}), (0.9, {"bits": 8, "bucket_size": 100, "norm": "l2"})],
)
@pytest.mark.parametrize("index", ["rice", "rice_blocks"])
def test_sums_are_the_cpu_s(gpu, index, sizes, density, value):
    pipeline = made(density, index, **value)
    for ranks in (1, 3, 9):
        data = gathered(pipeline, sizes, ranks)
        want = np.full(sum(sizes), 7, np.float32)
        own = bundle.sum_into(want, data, ranks, slices(pipeline, sizes), 0.5)
        assert by_hand(gpu, pipeline, data, np.full_like(want, 7), sizes, ranks)[0] == own
        assert by_hand(gpu, pipeline, data, np.full_like(want, 7), sizes, ranks)[1].tobytes() == want.tobytes()


@pytest.mark.parametrize("index", ["rice", "rice_blocks"])
def test_a_changed_byte_leaves_the_output_and_is_refused_by_its_rank(gpu, index):
    pipeline, sizes = made(index=index), [60, 90]
    data = gathered(pipeline, sizes, 2)
    for at in range(0, data.size, 1 if ON_GPU else 3):
        broken = data.copy()
        broken[at] ^= 1 << at % 8
        out = np.full(150, 7, np.float32)
        own, found = by_hand(gpu, pipeline, broken, out, sizes, 2)
        assert own is None and (found == 7).all()
    there = gpu.put(out)
    with pytest.raises(ContainerError, match="rank 1 cannot be read"):
        bundle.sum_into(there, gpu.bytes(broken), 2, slices(pipeline, sizes), 1.0)
    for size in (0, 4, data.size // 2, data.size - 1):
        assert by_hand(gpu, pipeline, data[:size], out, sizes, 2)[0] is None
    assert by_hand(gpu, pipeline, np.append(data, np.uint8(0)), out, sizes, 2)[0] is None


@pytest.mark.parametrize(("index", "kernels"), [("rice", 3), ("rice_blocks", 4)])
def test_launches_do_not_grow_with_the_ranks(gpu, index, kernels):
    if ON_GPU:
        pytest.skip("the emulator counts launches and waits")
    pipeline, sizes = made(index=index), [3000]
    for ranks in (2, 8):
        data = gathered(pipeline, sizes, ranks)
        before = cuda_emulator.launches, cuda_emulator.waits
        by_hand(gpu, pipeline, data, np.zeros(3000, np.float32), sizes, ranks)
        # Headers, the kernels, the sum's two; waits for the headers, the error, and the test's copy of the result.
        assert (cuda_emulator.launches - before[0], cuda_emulator.waits - before[1]) == (kernels + 3, 3)
