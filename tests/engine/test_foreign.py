"""A rank that sends another tensor's container, or one that the config does not give: all ranks refuse it."""

import numpy as np
import pytest

from hvd_deepreduce import ContainerError
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.config import Config
from hvd_deepreduce.pipeline import Pipeline
from tests.engine.numpy_adapter import NumpyAdapter, run_ranks

CONFIG = {"sparsifier": {"name": "topk", "density": 0.1}, "index": "rice", "value": "raw"}
MODEL = {"a": ((400,), "f4"), "b": ((30, 20), "f4")}


def gradients(rank: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(rank)
    return {name: rng.standard_normal(shape).astype(dtype) for name, (shape, dtype) in MODEL.items()}


def as_float64(gradient: np.ndarray, key: RngKey) -> np.ndarray:
    return Pipeline(Config.load(CONFIG)).encode(np.full(gradient.size, 1e300), None, key, version=2)


def another_codec(gradient: np.ndarray, key: RngKey) -> np.ndarray:
    other = Pipeline(Config.load(sparsifier="none", joint="densestream"))
    return other.encode(np.ones_like(gradient), None, key, version=2)


def another_key(gradient: np.ndarray, key: RngKey) -> np.ndarray:
    key = key._replace(parameter=77, step=123456)
    return Pipeline(Config.load(CONFIG)).encode(gradient, None, key, version=2)


def last_step(gradient: np.ndarray, key: RngKey) -> np.ndarray:
    return Pipeline(Config.load(CONFIG)).encode(gradient, None, key._replace(step=key.step - 1), version=2)


def version_1(gradient: np.ndarray, key: RngKey) -> np.ndarray:
    return Pipeline(Config.load(CONFIG)).encode(gradient, None, key)


FOREIGN = [as_float64, another_codec, another_key, last_step, version_1]


@pytest.mark.parametrize("scope", ["tensor", "model"])
@pytest.mark.parametrize("foreign", FOREIGN)
def test_a_foreign_container_is_refused_on_all_ranks(foreign, scope: str) -> None:
    def work(collectives):
        adapter = NumpyAdapter(collectives, MODEL, Config.load(CONFIG, scope=scope))
        adapter.step(gradients(collectives.rank()))
        if collectives.rank() == 1:
            adapter.engine.pipeline.encode = lambda gradient, residual, key, *_: foreign(gradient, key)
        message = "of this tensor at step 1 with this rank's config: it was altered on the way, or is of another"
        with pytest.raises(ContainerError, match=f"rank 1 cannot be read: .*({message}|announces|cannot give)") as info:
            adapter.step(gradients(collectives.rank()))
        return str(info.value)

    said = run_ranks(3, work)
    assert len(set(said)) == 1
