"""The kernels of a job's first step are there before it; in the emulator, whose kernels are compiled files too."""

from __future__ import annotations

import logging
import time

import numpy as np
import pytest

from hvd_deepreduce import Config
from hvd_deepreduce.engine import compiling
from hvd_deepreduce.ops import device
from tests import cuda_emulator
from tests.engine.numpy_adapter import EmulatedTensors, NumpyAdapter, OverHost, run_ranks
from tests.selection import first

BUCKET = {"scope": "bucket"}


CONFIGS = [
    {"sparsifier": {"name": "topk", "density": 0.01}, **BUCKET},
    {"index": "rans", "value": {"name": "qsgd", "entropy": "rans"}, **BUCKET},
    {"index": {"name": "bloom", "policy": "p2"}, "value": "fit_poly", **BUCKET},
    {"memory": "scaled_momentum", "value": "sign", **BUCKET},
    {**BUCKET, "exchange": {"name": "reduce_scatter", "density": 0.02}},
    {"overrides": {"a": {"value": "half", "index": "delta"}}},
]


@pytest.fixture
def compiled(monkeypatch):
    """The files of kernels that this process has loaded, none at first."""
    modules = {}
    monkeypatch.setattr(device, "_modules", modules)
    monkeypatch.setattr(device, "_functions", {})
    monkeypatch.setattr(device, "_cupy", lambda: cuda_emulator)
    return lambda: {file for *_, file in modules}


@pytest.mark.emulator
@pytest.mark.parametrize("config", first(CONFIGS, 2))
def test_the_first_steps_compile_nothing(compiled, config):
    if cuda_emulator.available():
        pytest.skip(cuda_emulator.available())
    tensors = EmulatedTensors()
    compiling.Compilation(Config.load(config), tensors, ["emulated"], True).wait()
    assert {name.rsplit("_", 1)[0] for name in tensors.side_streams_of} == {"deepreduce compile"}
    before = compiled()
    assert "select/select" in before

    def work(one):
        collectives = OverHost(one.job, one.rank())
        adapter = NumpyAdapter(collectives, {"a": ((30_000,), np.float32), "b": ((70,), np.float32)}, config, tensors)
        for step in range(2):
            rng = np.random.default_rng([step, collectives.rank()])
            adapter.step({"a": rng.standard_normal(30_000, np.float32), "b": rng.standard_normal(70, np.float32)})

    run_ranks(2, work)
    assert compiled() == before


@pytest.mark.parametrize(
    ("devices", "speaks", "said"), [(["emulated"], True, 1), (["emulated"], False, 0), ([None], True, 0)]
)
def test_a_rank_says_why_it_waits(monkeypatch, caplog, devices, speaks, said):
    monkeypatch.setattr(compiling, "PATIENCE", 0.01)
    monkeypatch.setattr(compiling, "_decode_on", lambda pipeline, within: time.sleep(0.2))
    monkeypatch.setattr(compiling, "_encode_on", lambda pipeline, within: 1 / 0)
    compilation = compiling.Compilation(Config.load({}), EmulatedTensors(), devices, speaks)
    for _ in range(2):
        compilation.wait()
    assert [record.getMessage().split(",")[0] for record in caplog.records if record.levelno == logging.WARNING] == [
        "DeepReduce compiles its CUDA kernels"
    ] * said


def test_what_cannot_be_compiled_is_left_to_the_step(monkeypatch):
    def without():
        raise ImportError("no CuPy")

    monkeypatch.setattr(device, "_cupy", without)
    compiling.Compilation(Config.load({}), EmulatedTensors(), ["emulated"], True).wait()
