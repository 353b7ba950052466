"""Settings of single tensors: each is encoded by itself, with a scale and with settings of its own."""

import numpy as np
import pytest

from hvd_deepreduce import ConfigError, ContainerError
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.config import Config
from hvd_deepreduce.engine import MismatchError
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.wire import standalone as wire
from tests.damaged import damage
from tests.engine.numpy_adapter import Job, NumpyAdapter, ThreadCollectives, run_ranks

MODEL = {
    "embedding.weight": ((50, 16), "f4"), "layer.weight": ((30, 20), "f4"), "layer.bias": ((30,), "f4"),
    "head.weight": ((400,), "f4"), "head.bias": ((7,), "f4"),
}  # fmt: skip
OVERRIDES = {
    "head.bias": {},
    "*.bias": {"density": 1.0, "value": "raw"},
    "embedding.*": {"sparsifier": "none", "joint": "three_lc"},
    "head.*": {"index": "bitmap", "value": {"bits": 4}, "error_feedback": False},
}
CONFIG = {"sparsifier": {"name": "topk", "density": 0.05}, "seed": 3, "overrides": OVERRIDES}
TENSOR = {"scope": "tensor", "min_elements": 0}
SCOPES = [
    TENSOR,
    {"scope": "model", "selection": "tensor"},
    {"scope": "bucket", "bucket_bytes": 3000, "selection": "tensor"},
]


def gradients_of(step, rank):
    rng = np.random.default_rng([step, rank])
    return {name: (rng.standard_normal(shape) ** 3).astype(dtype) for name, (shape, dtype) in MODEL.items()}


def alone(**settings):
    return NumpyAdapter(ThreadCollectives(Job(1), 0), MODEL, {**CONFIG, **settings}).engine


@pytest.mark.parametrize("value", ["sign", {"name": "ternary", "bucket_size": None}, {"name": "uniform", "bits": 16}])
@pytest.mark.parametrize("scope", ["model", "bucket"])
def test_tensors_of_a_larger_scope_have_scales_of_their_own(scope, value):
    """With one scale for both, 0.0018 and 17.6 were both decoded to 8.78."""
    model = {"small": ((64,), "f4"), "large": ((64,), "f4")}
    small = np.tile(np.float32([0.0018, -0.0018]), 32)
    given = {"small": small, "large": np.float32(17.6 / 0.0018) * small}
    config = {"sparsifier": "none", "value": value, "scope": scope, "selection": "tensor"}

    def work(collectives):
        return NumpyAdapter(collectives, model, config).step(given)

    for reduced in run_ranks(2, work):
        for name in model:
            assert np.allclose(reduced[name], given[name], rtol=1e-3), name


def by_hand():
    """Means and residuals of three ranks over three steps, from a pipeline for each tensor."""
    base = {key: setting for key, setting in CONFIG.items() if key != "overrides"}
    changes = {
        "embedding.weight": {"sparsifier": "none", "index": None, "value": None, "joint": "three_lc"},
        "layer.bias": {"density": 1.0, "value": "raw"},
        "head.weight": {"index": "bitmap", "value": {"name": "qsgd", "bits": 4}, "error_feedback": False},
    }
    pipelines = {name: Pipeline(Config.load(base, **changes.get(name, {}))) for name in MODEL}
    kept = [{name: np.zeros(np.prod(shape), "f4") for name, (shape, _) in MODEL.items()} for _ in range(3)]
    means = []
    for step in range(3):
        means.append({})
        for number, (name, pipeline) in enumerate(pipelines.items()):
            containers = []
            for rank in range(3):
                residual = kept[rank][name] if pipeline.config.error_feedback else None
                gradient = gradients_of(step, rank)[name].reshape(-1)
                containers.append(wire.unpack(pipeline.encode(gradient, residual, RngKey(3, number, step, rank))))
            means[-1][name] = np.empty(containers[0].numel, "f4")
            pipeline.decode(containers, means[-1][name], 1 / 3)
    return means, kept


@pytest.mark.parametrize("scope", SCOPES, ids=lambda scope: scope["scope"])
def test_each_tensor_has_its_settings(scope):
    """In every scope the same means, and each tensor's residual; the first pattern that matches counts."""

    def work(collectives):
        adapter = NumpyAdapter(collectives, MODEL, {**CONFIG, **scope})
        return [adapter.step(gradients_of(step, collectives.rank())) for step in range(3)], adapter.engine.state_dict()

    means, kept = by_hand()
    for (reduced, state), residuals in zip(run_ranks(3, work), kept, strict=True):
        for ours, theirs in zip(reduced, means, strict=True):
            for name in MODEL:
                assert np.allclose(ours[name].reshape(-1), theirs[name], rtol=1e-6, atol=1e-7), name
        assert all(np.array_equal(one, residuals[name]) for name, one in state["residuals"].items())
        assert set(state["residuals"]) == set(MODEL)


def test_a_larger_scope_sends_the_containers_of_its_tensors():
    messages = []
    for scope in ({**TENSOR, "bucket_bytes": 1024}, SCOPES[1]):
        job = Job(2)

        def work(collectives, scope=scope):
            NumpyAdapter(collectives, MODEL, {**CONFIG, **scope}).step(gradients_of(0, collectives.rank()))

        run_ranks(2, work, job)
        messages.append([[data.tobytes() for name, data in sent if name != "handshake"] for sent in job.sent])
    for tensors, (model,) in zip(*messages, strict=True):
        assert len(tensors) == len(MODEL) and len(model) == sum(map(len, tensors))
        for one in reversed(tensors):  # in the model's order; the checksums differ, as the configs do
            assert model[4 : len(one)] == one[4:]
            model = model[len(one) :]


def test_a_damaged_container_names_its_rank_and_tensor():
    def work(collectives):
        adapter = NumpyAdapter(collectives, MODEL, {**CONFIG, **SCOPES[1]})
        if collectives.rank() == 1:
            damage(adapter.engine.pipeline_of(adapter.engine.parameters["layer.bias"]))
        with pytest.raises(ContainerError, match="rank 1 cannot be read: .* of this tensor at step 0") as info:
            adapter.step(gradients_of(0, collectives.rank()))
        return str(info.value)

    assert len(set(run_ranks(3, work))) == 1


def test_what_is_not_finite_in_one_tensor_leaves_the_others_compressed():
    def work(collectives):
        adapter = NumpyAdapter(collectives, MODEL, {**CONFIG, **SCOPES[1]})
        given = gradients_of(0, collectives.rank())
        if collectives.rank() == 1:
            given["layer.weight"][2, 3] = np.inf
        reduced = adapter.step(given)
        return reduced, adapter.engine.stats.to_dict()["total"]["bytes_sent"]

    for rank, (reduced, sent) in enumerate(run_ranks(2, work)):
        assert [name for name in MODEL if not np.isfinite(reduced[name]).all()] == ["layer.weight"]
        assert (sent > 600 * 4) == (rank == 1) and sent < 4 * 1800


def test_small_tensors_have_limits_of_their_own():
    engine = alone(min_elements=100, overrides={"*.bias": {"min_elements": 8}, "layer.*": {"value": "raw"}})
    small = [name for name, one in engine.parameters.items() if engine.uncompressed(one, one.numel, 4)]
    assert small == ["head.bias"]


def test_overrides_that_apply_to_nothing():
    nothing = (
        r"the pattern 'decoder.\*' of overrides matches none of the 5 parameters \('embedding.weight', .*correct it"
    )
    hidden = "the pattern 'layer.bias' of overrides matches 'layer.bias' and no parameter that an earlier pattern"
    for overrides, message in (({"decoder.*": {}}, nothing), ({"*.bias": {}, "layer.bias": {"value": "raw"}}, hidden)):
        with pytest.raises(ConfigError, match=message):
            alone(overrides=overrides)
        engine = alone()
        with pytest.raises(ConfigError, match=message):
            engine.set_config(overrides=overrides)
        assert engine.config == Config.load(CONFIG)
    engine.set_config(overrides={})
    assert engine.pipeline_of(engine.parameters["layer.bias"]) is engine.pipeline


def test_ranks_with_other_overrides():
    def work(collectives):
        overrides = {"*.bias": {"value": "raw"}, "head.*": {"value": {"bits": 4}}}
        if collectives.rank() == 1:
            overrides = dict(reversed(overrides.items()))
        with pytest.raises(MismatchError, match="config.overrides is .* on ranks 0, 2, .* on rank 1"):
            NumpyAdapter(collectives, MODEL, {**CONFIG, "overrides": overrides}).step(gradients_of(0, 0))

    run_ranks(3, work)
