"""A rank that sends another tensor's container, or one that the config does not give: all ranks refuse it."""

import numpy as np
import pytest

from hvd_deepreduce import ContainerError
from hvd_deepreduce import container as wire
from hvd_deepreduce.codec import RngKey
from hvd_deepreduce.config import Config
from hvd_deepreduce.pipeline import Pipeline
from tests.engine.numpy_adapter import NumpyAdapter, run_ranks

CONFIG = {"sparsifier": {"name": "topk", "density": 0.1}, "index": "rice", "value": "raw", "min_elements": 0}
MODEL = {"a": ((400,), "f4"), "b": ((30, 20), "f4")}


def gradients(rank: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(rank)
    return {name: rng.standard_normal(shape).astype(dtype) for name, (shape, dtype) in MODEL.items()}


def as_float64(packed: np.ndarray, key: RngKey) -> np.ndarray:
    return Pipeline(Config.load(CONFIG)).encode(np.full(wire.unpack(packed).numel, 1e300), None, key)


def another_codec(packed: np.ndarray, key: RngKey) -> np.ndarray:
    gradient = np.ones(wire.unpack(packed).numel, np.float32)
    return Pipeline(Config.load(sparsifier="none", joint="densestream")).encode(gradient, None, key)


def another_key(packed: np.ndarray, key: RngKey) -> np.ndarray:
    gradient = np.ones(wire.unpack(packed).numel, np.float32)
    return Pipeline(Config.load(CONFIG)).encode(gradient, None, key._replace(parameter=77, step=123456))


FOREIGN = {
    "is float64, and this one is float32": as_float64,
    r"joint 4 \(densestream\), which this job's config cannot give \(sparsifier 'topk', index 'rice'": another_codec,
    "parameter 77 and step 123456, and this rank is at seed 0, parameter [01] and step 1": another_key,
}


@pytest.mark.parametrize("scope", ["tensor", "model"])
@pytest.mark.parametrize("message", FOREIGN)
def test_a_foreign_container_is_refused_on_all_ranks(message: str, scope: str) -> None:
    def work(collectives):
        adapter = NumpyAdapter(collectives, MODEL, Config.load(CONFIG, scope=scope))
        adapter.step(gradients(collectives.rank()))
        pipeline = adapter.engine.pipeline
        encode, digest = pipeline.encode, pipeline.digest

        def foreign(gradient, residual, key, parts=None):
            packed = FOREIGN[message](encode(gradient, residual, key, parts), key)
            container = wire.unpack(packed)
            object.__setattr__(container, "digest", digest)
            return wire.pack(container)

        if collectives.rank() == 1:
            pipeline.encode = foreign
        with pytest.raises(ContainerError, match=f"rank 1 cannot be read: .*{message}") as info:
            adapter.step(gradients(collectives.rank()))
        return str(info.value)

    said = run_ranks(3, work)
    assert len(set(said)) == 1
