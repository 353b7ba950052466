"""Deep gradient compression (``memory: dgc``) and density schedules, in the pipeline and in the engine; and what all
memories with a velocity have in common."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_deepreduce import Config, ConfigError
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.config.schedule import DensitySchedule
from hvd_deepreduce.engine import small
from hvd_deepreduce.engine import state as saved
from hvd_deepreduce.engine.parameter import VELOCITY
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.wire import frame
from hvd_deepreduce.wire import standalone as wire
from hvd_deepreduce.wire.decoding import decode_part
from tests.engine.numpy_adapter import NumpyAdapter, run_ranks
from tests.engine.test_step import gradients_of, same_bytes
from tests.oracle import dgc as oracle
from tests.selection import examples

MODEL = {"a": ((20, 30), "f4"), "b": ((30,), "f4"), "c": ((7, 8, 9), "f8")}
SCOPES = [
    {"scope": "tensor", "min_elements": 0},
    {"scope": "bucket", "bucket_bytes": 2000},
    {"scope": "bucket", "bucket_bytes": 2000, "selection": "tensor"},
    {"scope": "model"},
]
DGC = {"sparsifier": {"name": "topk", "density": 0.05}, "value": "raw", "memory": {"name": "dgc", "momentum": 0.9}}
BOTH = [DGC, {**DGC, "value": {"name": "sign", "magnitude": "one"}, "memory": {"name": "scaled_momentum", "clip": 9.0}}]
both_memories = pytest.mark.parametrize("settings", BOTH, ids=lambda one: one["memory"]["name"])
every_scope = pytest.mark.parametrize("scope", SCOPES, ids=lambda s: "-".join(map(str, s.values())))


def key(step):
    return RngKey(1, 2, step)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.integers(0, 2**32 - 1), st.integers(1, 60), st.floats(0.1, 0.95), st.floats(0.05, 0.9), st.booleans(),
    st.sampled_from([None, 0.5, 3.0]), st.integers(1, 5),
)  # fmt: skip
def test_equals_the_oracle(seed, numel, momentum, density, nesterov, clip, ranks):
    """In float64. Differences are those of the order in which squares are added for the norm."""
    rng = np.random.default_rng(seed)
    memory = {"name": "dgc", "momentum": momentum, "nesterov": nesterov, "clip": clip}
    config = Config.load(sparsifier={"name": "topk", "density": density}, value="raw", memory=memory)
    pipeline = Pipeline(config)
    residual, velocity = np.zeros(numel), np.zeros(numel)
    u, v = [0.0] * numel, [0.0] * numel
    for step in range(6):
        gradient = rng.standard_normal(numel) * rng.lognormal(size=numel)
        before = gradient.copy()
        packed = pipeline.encode(gradient, residual, key(step), 2, velocity, ranks)
        np.testing.assert_array_equal(gradient, before)
        most = None if clip is None else clip / ranks**0.5
        k = max(1, int(density * numel * (1 + 1e-12)))
        sent = oracle.step(u, v, gradient.tolist(), momentum, k, nesterov, most)
        (containers,) = frame.split(packed, 1, [pipeline.expected(numel, gradient.dtype, key(step))])
        support, values = decode_part(containers[0], numel)
        assert support.tolist() == sorted(sent)
        np.testing.assert_allclose(values, [sent[i] for i in sorted(sent)], rtol=1e-9)
        np.testing.assert_allclose(residual, v, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(velocity, u, rtol=1e-9, atol=1e-12)


def test_with_everything_sent_at_last_it_is_momentum():
    """Momentum correction: of an element that is sent once, the sum of what an optimizer with momentum applies."""
    pipeline = Pipeline(Config.load(DGC, density=0.1))
    residual, velocity = np.zeros(10, np.float32), np.zeros(10, np.float32)
    moment, applied = 0.0, 0.0
    for step in range(5):
        gradient = np.zeros(10, np.float32)
        gradient[3], gradient[7] = 1.0, 100.0
        pipeline.encode(gradient, residual, key(step), 2, velocity)
        moment = 0.9 * moment + 1.0
        applied += moment
    assert residual[3] == pytest.approx(applied, rel=1e-6) and velocity[3] == pytest.approx(moment, rel=1e-6)
    assert residual[7] == velocity[7] == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("memory", [
    {"name": "dgc", "clip": 1.0}, {"name": "dgc", "nesterov": True, "clip": 1.0},
    {"name": "scaled_momentum", "clip": 1.0}, {"name": "scaled_momentum"},
], ids=str)  # fmt: skip
def test_a_gradient_that_is_not_finite_changes_nothing(bad, memory):
    rng = np.random.default_rng(1)
    gradient, residual, velocity = (rng.standard_normal(500).astype(np.float32) for _ in range(3))
    velocity, gradient[77] = np.abs(velocity), bad
    kept = residual.copy(), velocity.copy()
    packed = Pipeline(Config.load(DGC, memory=memory)).encode(gradient, residual, key(0), 2, velocity)
    assert packed.size > gradient.nbytes
    np.testing.assert_array_equal(residual, kept[0])
    np.testing.assert_array_equal(velocity, kept[1])


def test_a_momentum_beyond_the_largest_number_stays_finite():
    """So a gradient that is known to be finite need not be looked at again."""
    packed = []
    for finite in (False, True):
        gradient, velocity = (np.array([1, 2, 3e38, 4], np.float32) for _ in range(2))
        residual = np.zeros(4, np.float32)
        packed.append(Pipeline(Config.load(DGC)).encode(gradient, residual, key(0), velocity=velocity, finite=finite))
        assert np.isfinite(residual).all() and np.isfinite(velocity).all()
    assert packed[0].tobytes() == packed[1].tobytes()
    support, values = decode_part(wire.unpack(packed[0]), 4)
    assert support.tolist() == [2] and values.tolist() == [np.finfo(np.float32).max]


@pytest.mark.parametrize("value", ["qsgd", "fit_poly"])
def test_what_was_rounded_stays_in_the_residual_and_the_velocity_does_not(value):
    rng = np.random.default_rng(1)
    gradient, residual, velocity = (rng.standard_normal(500).astype(np.float32) for _ in range(3))
    total, before = residual + np.float32(0.9) * velocity + gradient, velocity.copy()
    pipeline = Pipeline(Config.load(DGC, value=value))
    packed = pipeline.encode(gradient, residual, key(0), 2, velocity)
    (containers,) = frame.split(packed, 1, [pipeline.expected(500, gradient.dtype, key(0))])
    support, values = decode_part(containers[0], 500)
    expected = total.copy()
    expected[support] -= values
    np.testing.assert_allclose(residual, expected, rtol=1e-5, atol=1e-6)
    assert (velocity[support] == 0).all() and (residual[support] != 0).any()
    rest = np.delete(np.arange(500), support)
    np.testing.assert_allclose(velocity[rest], (np.float32(0.9) * before + gradient)[rest], rtol=1e-6)


@both_memories
@every_scope
def test_a_resumed_job_equals_an_unbroken_one(scope, settings):
    """With velocities and a density that changes before and after the break."""
    config = {**settings, **scope, "density_schedule": [[2, 0.5], [4, 0.2]]}

    def work(collectives):
        rank = collectives.rank()
        adapter = NumpyAdapter(collectives, MODEL, config)
        results = [adapter.step(gradients_of(step, rank, MODEL)) for step in range(6)]
        first = NumpyAdapter(collectives, MODEL, config)
        again = [first.step(gradients_of(step, rank, MODEL)) for step in range(3)]
        state = saved.from_bytes(saved.to_bytes(first.engine.state_dict()))
        second = NumpyAdapter(collectives, MODEL, config)
        second.engine.load_state_dict(state)
        again += [second.step(gradients_of(step, rank, MODEL)) for step in range(3, 6)]
        return results, again, state

    ranks = run_ranks(2, work)
    for step in range(6):
        same_bytes([results[step] for results, _, _ in ranks] + [again[step] for _, again, _ in ranks])
    names = set(ranks[0][2]["residuals"])
    assert names == {*MODEL, *(f"velocity of {name}" for name in MODEL)}


def test_states_of_another_number_of_ranks_keep_the_sums_of_velocities():
    states = [
        {"rank": rank, "size": 2, "steps": {"a": 3},
         "residuals": {"a": np.full(4, rank + 1.0, np.float32), "velocity of a": np.full(4, rank + 3.0, np.float32)}}
        for rank in range(2)
    ]  # fmt: skip
    parameters, memory = {"a": saved.Parameter("a", 0, (4,), "float32")}, Config.load(DGC).memory
    _, kept = saved.reshard(states, parameters, 0, 1, True, memory)
    assert kept["a"].tolist() == [3.0] * 4 and kept["velocity of a"].tolist() == [7.0] * 4
    states[0]["residuals"]["velocity of a"] = np.zeros(5, np.float32)
    with pytest.raises(ValueError, match="the velocity of a has 5 elements"):
        saved.reshard(states, parameters, 0, 1, True, memory)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.floats(0.001, 1)), min_size=1, max_size=4), st.floats(0.001, 1),
    st.sampled_from(["constant", "exponential"]), st.integers(0, 40),
)  # fmt: skip
def test_densities_equal_the_oracle(parts, final, interpolation, step):
    steps, end = [], 0
    for length, density in parts:
        end += length
        steps.append((end, density))
    schedule = DensitySchedule(steps=tuple(steps), interpolation=interpolation)
    assert schedule.density_at(step, final) == pytest.approx(
        oracle.schedule(steps, interpolation, final, step), rel=1e-9
    )


WITH_DENSITY = ["topk", "chunk_topk", "block_topk", "randomk", "sampled_topk"]


@pytest.mark.parametrize("sparsifier", WITH_DENSITY)
@every_scope
def test_every_sparsifier_follows_the_schedule_in_every_scope(sparsifier, scope):
    """A step sends what the same job sends whose density is that of the step."""

    def config(**changes):
        settings = {"sparsifier": {"name": sparsifier, "density": 0.05}, "value": "raw", "error_feedback": False}
        if sparsifier == "block_topk":
            settings["sparsifier"]["block"] = 4
        return Config.load({**settings, **scope}, **changes)

    def work(collectives, *configs):
        adapter = NumpyAdapter(collectives, MODEL, configs[0])
        results = []
        for step, now in enumerate(configs):
            adapter.engine.set_config(now)
            results.append(adapter.step(gradients_of(step, collectives.rank(), MODEL)))
        return results

    scheduled = config(density_schedule=[[1, 0.5], [2, 0.25]])
    plain = [config(density=density) for density in (0.5, 0.25, 0.05)]
    for one, other in zip(
        run_ranks(2, lambda c: work(c, *[scheduled] * 3)), run_ranks(2, lambda c: work(c, *plain)), strict=True
    ):
        for step in range(3):
            same_bytes([one[step], other[step]])


def test_a_velocity_goes_with_its_memory_and_this_is_told(caplog):
    """It would be applied when the memory comes back, however old it is then."""

    def work(collectives):
        adapter = NumpyAdapter(collectives, MODEL, {**DGC, "overrides": {"a": {"memory": "residual"}}})
        adapter.step(gradients_of(0, collectives.rank(), MODEL))
        before = adapter.engine.state_dict()["residuals"]
        adapter.engine.set_config({**DGC, "memory": "residual"})
        return before, adapter.engine.state_dict()["residuals"]

    for before, after in run_ranks(2, work):
        velocities = [[name for name in one if name.startswith(VELOCITY)] for one in (before, after)]
        assert velocities[0] and not velocities[1]
        for name, kept in after.items():
            assert np.array_equal(kept, before[name])
    assert "the velocities of" in caplog.text and "memory is 'residual' now" in caplog.text


def test_a_tensor_can_have_a_schedule_of_its_own_or_none():
    config = Config.load(
        "dgc", overrides={"*.bias": {"density_schedule": None, "density": 1.0}, "x": {"density_schedule": [[5, 0.9]]}}
    )
    assert config.sparsifier_at(0).density == 0.25 and config.sparsifier_at(400).density == 0.001
    assert config.variants["*.bias"].sparsifier_at(0).density == 1.0
    assert config.variants["x"].sparsifier_at(4).density == 0.9


def test_small_tensors_are_judged_by_the_density_after_the_schedule():
    plain, scheduled = (
        Pipeline(Config.load(density=0.01, density_schedule=schedule)) for schedule in (None, [[9, 0.9]])
    )
    f32 = np.dtype(np.float32)
    assert plain.estimate(900, f32) == scheduled.estimate(900, f32)


@both_memories
def test_small_tensors_have_momentum_too(settings):
    assert small.uncompressed(Pipeline(Config.load(scope="tensor")), 3, 4)
    assert not small.uncompressed(Pipeline(Config.load(settings, scope="tensor")), 3, 4)


WRONG = [
    ({"density_schedule": [[10, 0.5], [10, 0.2]]}, "density_schedule has the steps 10, 10: each must be larger"),
    ({"density_schedule": [[0, 0.5]]}, "density_schedule.steps.0.0 is 0, which is not allowed"),
    ({"density_schedule": [[5, 1.5]]}, "density_schedule.steps.0.1 is 1.5, which is not allowed"),
    ({"density_schedule": [[True, 0.5]]}, "density_schedule.steps is .*it should be a number"),
    ({"density_schedule": [[5, True]]}, "density_schedule.steps is .*it should be a number"),
    ({"density_schedule": []}, "density_schedule.steps is .*not allowed"),
    ({"density_schedule": [[5, 0.01], [9, 0.01]]}, "density_schedule has the density 0.01 and no other"),
    ({"density_schedule": [[5, 0.5]], "sparsifier": "nonzero"}, "density_schedule is .* 'nonzero' has no density"),
    ({"memory": "dgc", "error_feedback": False}, "memory is 'dgc' and has no effect, since error_feedback is False"),
    ({"memory": "dgc", "sparsifier": "none"}, "memory is 'dgc' and has no effect, since sparsifier 'none' sends all"),
    ({"memory": "dgc", "exchange": "sparcml"}, "memory is 'dgc' and .* exchange 'sparcml' does not tell which"),
    ({"memory": "dgc", "min_elements": 5}, "min_elements is 5 and has no effect, since memory is 'dgc'"),
    ({"memory": {"name": "dgc", "momentum": 1.0}}, "memory.momentum is 1.0, which is not allowed"),
    ({"memory": "adam"}, "memory is 'adam'; it must be a name"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_wrong_settings_and_those_without_effect_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Config.load(settings)


def test_a_preset_loses_what_has_no_effect_beside_the_keywords():
    assert Config.load("dgc", sparsifier="nonzero").density_schedule is None
    assert Config.load("dgc", error_feedback=False).memory.name == "residual"


def test_configs_with_a_schedule_are_plain_text():
    config = Config.load("dgc", density_schedule={"steps": [[400, 0.25]], "interpolation": "exponential"})
    assert Config.load(config.to_dict()) == config
    assert config.digest() != Config.load("dgc").digest()
    assert config.to_dict()["density_schedule"] == {"steps": [[400, 0.25]], "interpolation": "exponential"}
