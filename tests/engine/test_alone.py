"""Of gradients that are encoded by themselves on a GPU, which takes the host as long as a bucket of many does."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from hvd_deepreduce.engine import engine
from tests import cuda_emulator
from tests.engine.numpy_adapter import EmulatedTensors, NumpyAdapter, NumpyTensors, OverHost, run_ranks

pytestmark = [
    pytest.mark.emulator, pytest.mark.skipif(bool(cuda_emulator.available()), reason=cuda_emulator.available())
]  # fmt: skip
TENSOR = {"scope": "tensor", "min_elements": 0}


@pytest.fixture
def said(caplog):
    """What is logged in two steps of two ranks."""
    engine._warn_once.cache_clear()

    def job(config, count=engine.FEW + 1, tensors=EmulatedTensors):
        gradients = {f"p{number}": np.full(20, 1 + number, np.float32) for number in range(count)}
        model = {name: (one.shape, one.dtype) for name, one in gradients.items()}

        def work(collectives):
            adapter = NumpyAdapter(OverHost(collectives.job, collectives.rank()), model, config, tensors())
            for _ in range(2):
                adapter.step(gradients)

        caplog.clear()
        with caplog.at_level(logging.WARNING, "hvd_deepreduce"):
            run_ranks(2, work)
        return [record.getMessage() for record in caplog.records]

    yield job
    engine._warn_once.cache_clear()


def test_many_are_told_once(said):
    (told,) = said(TENSOR)
    assert told == engine.ALONE % "scope" and "Set scope to 'bucket', without selection" in told
    assert said(TENSOR) == []  # by another engine of the process
    assert said({"scope": "bucket", "selection": "tensor"}) == [engine.ALONE % "selection"]


@pytest.mark.parametrize("job", [
    {"config": TENSOR, "count": engine.FEW}, {"config": TENSOR, "tensors": NumpyTensors},
    {"config": {"scope": "bucket"}},
    {"config": {"scope": "model", "selection": "tensor", "exchange": "reduce_scatter"}},
])  # fmt: skip
def test_nothing_is_said_of_a_few_or_of_what_takes_less(said, job):
    assert said(**job) == []
