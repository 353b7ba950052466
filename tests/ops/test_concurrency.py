"""Real concurrency, which the emulator does not have: these run on a GPU only (HVD_DEEPREDUCE_GPU=1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.config import Config
from hvd_deepreduce.pipeline import Pipeline, bundle
from hvd_deepreduce.pipeline.bundle import Slice
from tests.ops.conftest import ON_GPU

if not ON_GPU:
    pytest.skip("the emulator runs one thread at a time: this needs a GPU", allow_module_level=True)

NUMEL = 25_600_000
TIMES = 200
KEY = RngKey(5, 6, 7)
CONFIGS = {
    "recommended": {},
    "rans": {"index": "rans", "value": {"name": "qsgd", "entropy": "rans"}},
    "bloom": {"index": {"name": "bloom", "policy": "p0"}, "value": "raw"},
    "stream": {"joint": "densestream", "index": None, "value": None},
}


def random(numel: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(numel, np.float32)


def mostly_zeros(numel: int) -> np.ndarray:
    gradient = random(numel)
    gradient[np.random.default_rng(1).random(numel) < 0.999] = 0
    return gradient


def with_nan(numel: int) -> np.ndarray:
    gradient = random(numel)
    gradient[numel // 3] = np.nan
    return gradient


INPUTS: dict[str, Callable[[int], np.ndarray]] = {
    "random": random,
    "99.9% zeros": mostly_zeros,
    "all equal": lambda numel: np.full(numel, 0.5, np.float32),
    "one NaN": with_nan,
}


def encoded(config: dict[str, Any], gradient: Any, residual: Any) -> Any:
    pipeline = Pipeline(Config.load("topk_rice_qsgd", **config))
    return pipeline.encode(gradient, residual, KEY, 2)


def same(gpu: Any, want: np.ndarray, got: Any) -> None:
    assert gpu.host(got).tobytes() == want.tobytes()


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("name", INPUTS)
def test_many_times_the_same_bytes(gpu, name, offset):
    """``offset``: the arrays begin at the first element of an allocation, or at the second."""
    gradient = INPUTS[name](NUMEL)
    start = random(NUMEL, 9)
    residual = start.copy()
    container = encoded({}, gradient, residual)
    there, fresh = (gpu.put(np.concatenate([np.zeros(offset, np.float32), one]))[offset:] for one in (gradient, start))
    pipeline = Pipeline(Config.load("topk_rice_qsgd"))
    wanted, kept = gpu.put(container), gpu.put(residual)
    different = 0
    for _ in range(TIMES):
        left = fresh.copy() if not offset else gpu.module.concatenate([fresh[:1], fresh])[1:]
        got = pipeline.encode(there, left, KEY, 2)
        # Compared on the GPU: copying 100 MB to the host two hundred times would take most of the test's time.
        equal = got.size == wanted.size and bool((got == wanted).all())
        different += not (equal and bool((left.view(np.uint32) == kept.view(np.uint32)).all()))
    assert different == 0


@pytest.mark.parametrize("name", CONFIGS)
def test_two_streams_at_once(gpu, name):
    gradients, starts = [random(2_000_000, seed) for seed in (0, 1)], [random(2_000_000, seed) for seed in (2, 3)]
    wanted = []
    for gradient, start in zip(gradients, starts, strict=True):
        residual = start.copy()
        wanted.append((encoded(CONFIGS[name], gradient, residual), residual))
    there, streams = [gpu.put(one) for one in gradients], [gpu.module.cuda.Stream(non_blocking=True) for _ in range(2)]
    fresh = [gpu.put(one) for one in starts]
    gpu.module.cuda.Device().synchronize()
    for _ in range(10):
        got = []
        for stream, gradient, start in zip(streams, there, fresh, strict=True):
            with stream:
                left = start.copy()
                got.append((encoded(CONFIGS[name], gradient, left), left))
        gpu.module.cuda.Device().synchronize()
        for (container, residual), (theirs, left) in zip(wanted, got, strict=True):
            same(gpu, container, theirs)
            same(gpu, residual, left)


def test_two_gpus(gpu):
    if gpu.module.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("this machine has one GPU, and the test needs two")
    gradient, start = random(2_000_000), random(2_000_000, 1)
    residual = start.copy()
    container = encoded({}, gradient, residual)
    for device in (1, 0, 1):
        with gpu.module.cuda.Device(device):
            there, left = gpu.put(gradient), gpu.put(start)
        same(gpu, container, encoded({}, there, left))  # the current device is another one than the arrays'
        same(gpu, residual, left)


def test_the_sum_of_many_ranks_is_the_cpu_s(gpu):
    pipeline, ranks = Pipeline(Config.load("topk_rice_qsgd")), 8
    slices = [Slice(pipeline, (0, NUMEL), KEY)]
    sent = [pipeline.encode(random(NUMEL, rank), None, KEY._replace(rank=rank), 2) for rank in range(ranks)]
    out = np.empty(NUMEL, np.float32)
    bundle.sum_into(out, np.concatenate(sent), ranks, slices, 1 / ranks)
    there = gpu.module.empty(NUMEL, np.float32)
    bundle.sum_into(there, gpu.put(np.concatenate(sent)), ranks, slices, 1 / ranks)
    same(gpu, out, there)
