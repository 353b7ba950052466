"""Which tensors go uncompressed: those for which a container would not pay."""

import numpy as np
import pytest

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.config import Config
from hvd_deepreduce.engine.small import CARRIER_BYTES, LARGE, MESSAGE_BYTES, uncompressed
from hvd_deepreduce.pipeline import Pipeline
from tests import cases

RESNET50 = {
    64: 14, 128: 16, 256: 32, 512: 22, 1000: 1, 1024: 14, 2048: 8, 4096: 1, 9408: 1, 16384: 6, 32768: 1, 36864: 3,
    65536: 7, 131072: 2, 147456: 4, 262144: 11, 524288: 2, 589824: 6, 1048576: 5, 2048000: 1, 2097152: 1, 2359296: 3,
}  # fmt: skip
"""How many of its tensors have so many elements."""


def bytes_of_resnet50(**settings):
    """Of one rank's step: containers and carriers, and what goes uncompressed."""
    pipeline, total = Pipeline(Config.load("signtopk", **settings)), 0
    for numel, tensors in RESNET50.items():
        size = 4 * numel
        if not uncompressed(pipeline, numel, 4):
            packed = pipeline.encode(cases.random(numel), None, RngKey(0, 0, 0), version=2)
            size = packed.size + CARRIER_BYTES
        total += tensors * size
    return total


def test_resnet50_under_sign_topk():
    """The published setting, at most 1,000 elements of a tensor. It was 174,936 bytes with a limit of 1,024 elements,
    and 95,344 without one, with headers of 64 bytes."""
    assert sum(n * tensors for n, tensors in RESNET50.items()) == 25_557_032 and sum(RESNET50.values()) == 161
    cap = {"name": "topk_capped", "cap": 1000}
    estimated = bytes_of_resnet50(sparsifier=cap)
    assert estimated <= min(86_500, bytes_of_resnet50(sparsifier=cap, min_elements=0))
    assert bytes_of_resnet50(sparsifier=cap, min_elements=1024) > 165_000


@pytest.mark.parametrize("config", ["topk_rice_qsgd", "signtopk", "topk_raw", "qsgd", "dr_bf_p2", "skcompress"])
def test_the_smaller_way_is_chosen(config):
    """Within a few bytes, as the estimate is of another gradient of the same size."""
    pipeline = Pipeline(Config.load(config, scope="tensor"))
    for numel in (0, 1, 5, 17, 33, 50, 64, 100, 200, 500, 1023):
        for itemsize in (2, 4, 8):
            dtype = np.float64 if itemsize == 8 else np.float32
            packed = pipeline.encode(cases.random(numel, dtype), None, RngKey(0, 3, 4), version=2)
            gain = itemsize * numel - packed.size - CARRIER_BYTES - MESSAGE_BYTES
            assert uncompressed(pipeline, numel, itemsize) == (gain <= 0) or abs(gain) < 0.1 * packed.size + 8
    assert not uncompressed(pipeline, LARGE, 4) and not uncompressed(pipeline, -1, 4)


def test_the_same_on_every_rank_and_estimated_once(monkeypatch):
    one, other = Pipeline(Config.load("signtopk"), threads=1), Pipeline(Config.load("signtopk", threads=3))
    sizes = [one.estimate(numel, np.dtype(np.float32)) for numel in range(64)]
    assert sizes == [other.estimate(numel, np.dtype(np.float32)) for numel in range(64)]
    monkeypatch.setattr(Pipeline, "encode", None)
    assert sizes == [one.estimate(numel, np.dtype(np.float32)) for numel in range(64)]


def test_an_explicit_limit():
    for limit in (0, 1, 50, 5000):
        pipeline = Pipeline(Config.load(min_elements=limit))
        for numel in (0, 1, 49, 50, 4999, 5000):
            assert uncompressed(pipeline, numel, 4) == (numel < limit)
    assert not uncompressed(Pipeline(Config.load(scope="model")), 1, 4)
