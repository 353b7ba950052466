"""Scaled momentum (``memory: scaled_momentum``) and signs of one magnitude, in the pipeline. test_dgc.py has the tests
of both memories with a velocity, and tests/adapters those of the optimizer ``SignMomentum``."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hvd_deepreduce import Config, ConfigError
from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.value.sign import Sign
from hvd_deepreduce.ops import momentum
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.wire import frame
from hvd_deepreduce.wire.decoding import decode_part
from tests import cases
from tests.oracle import scaled_momentum as oracle
from tests.selection import examples

VOTES = {
    "sparsifier": {"name": "topk", "density": 0.05}, "value": {"name": "sign", "magnitude": "one"},
    "memory": "scaled_momentum",
}  # fmt: skip


def key(step):
    return RngKey(1, 2, step)


def decoded(pipeline, packed, x, step):
    (containers,) = frame.split(packed, 1, [pipeline.expected(x.size, x.dtype, key(step))])
    return decode_part(containers[0], x.size)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.integers(0, 2**32 - 1), st.integers(1, 60), st.floats(0, 0.99), st.floats(0, 0.999), st.floats(0.05, 0.9),
    st.sampled_from([None, 0.5, 3.0]), st.sampled_from([np.float32, np.float64]),
)  # fmt: skip
def test_equals_the_oracle(seed, numel, decay, beta2, density, clip, dtype):
    """The oracle goes on from the pipeline's state, so that roundings do not add up."""
    rng = np.random.default_rng(seed)
    memory = {"name": "scaled_momentum", "decay": decay, "beta2": beta2, "eps": 1e-3, "clip": clip}
    pipeline = Pipeline(Config.load(VOTES, density=density, memory=memory))
    m, v = np.zeros(numel, dtype), np.zeros(numel, dtype)
    k, near = max(1, int(density * numel * (1 + 1e-12))), 64 * np.finfo(dtype).eps
    for step in range(5):
        gradient = (rng.standard_normal(numel) * rng.lognormal(size=numel)).astype(dtype)
        gradient[rng.random(numel) < 0.2] = 0
        before, squares, moments = gradient.copy(), v.tolist(), m.tolist()
        votes = oracle.step(squares, moments, gradient.tolist(), step + 1, decay, beta2, 1e-3, k, clip)
        packed = pipeline.encode(gradient, m, key(step), 2, v)
        np.testing.assert_array_equal(gradient, before)
        rest = np.abs(np.delete(moments, sorted(votes)))
        unsent = np.abs(m).max(initial=0)
        support, signs = decoded(pipeline, packed, gradient, step)
        if support.tolist() != sorted(votes):  # two momentums are equal, to rounding
            assume(abs(unsent - rest.max(initial=0)) > near * unsent)
        assert dict(zip(support.tolist(), signs.tolist(), strict=True)) == votes
        np.testing.assert_allclose(v, squares, rtol=near, atol=1e-30)
        np.testing.assert_allclose(m, moments, rtol=0, atol=near * (10 + np.abs(m).max()))


@pytest.mark.parametrize("codecs", [
    {"value": "qsgd"}, {"value": "fit_poly"}, {"index": {"name": "bloom", "policy": "p1", "fpr": 0.1}},
    {"index": {"name": "bloom", "fpr": 0.1}, "value": "fit_poly", "force_index": True},
    {"joint": "densestream", "index": None, "value": None},
    {"joint": {"name": "skcompress", "buckets": 8}, "index": None, "value": None},
], ids=str)  # fmt: skip
def test_what_is_sent_leaves_whole_whatever_is_decoded(codecs):
    x = [cases.random(4000, seed=seed) for seed in range(2)]
    pipeline = Pipeline(Config.load({**VOTES, **codecs}))
    m, v = np.zeros(4000, np.float32), np.zeros(4000, np.float32)
    pipeline.encode(x[0], m, key(0), 2, v)
    memory = pipeline.config.memory
    squares, added = momentum.scaled(v, x[1], m, memory.beta2, 2, memory.decay, memory.eps, 1.0)
    whole = m + added
    support, values = decoded(pipeline, pipeline.encode(x[1], m, key(1), 2, v), x[1], 1)
    assert support.size >= 190 and not m[support].any() and values.any()
    rest = np.setdiff1d(np.arange(4000), support)
    np.testing.assert_array_equal(m[rest], whole[rest])
    np.testing.assert_array_equal(v, squares)
    assert (v > 0).all()


def test_numbers_beyond_the_largest_stay_finite():
    """So a gradient that is known to be finite need not be looked at again."""
    packed = []
    for finite in (False, True):
        gradient, v = np.array([1, -3e38, 1e-30, 0], np.float32), np.zeros(4, np.float32)
        m = np.zeros(4, np.float32)
        for step in range(2):
            packed.append(Pipeline(Config.load(VOTES, density=0.3)).encode(gradient, m, key(step), 2, v, finite=finite))
        assert np.isfinite(m).all() and np.isfinite(v).all()
    assert packed[0].tobytes() == packed[2].tobytes() and packed[1].tobytes() == packed[3].tobytes()


@pytest.mark.parametrize("count", [0, 1, 33])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_signs_of_magnitude_one(count, dtype):
    """The section is that of values whose mean magnitude is 1."""
    values = cases.random(count, dtype)
    section, order = Sign(magnitude="one").encode(values, None, key(0))
    assert order is None and section.tobytes() == Sign().encode(np.sign(values), None, key(0))[0].tobytes()


WRONG = [
    ({**VOTES, "exchange": {"name": "reduce_scatter", "density": 0.1}},
     "memory is 'scaled_momentum' and exchange is 'reduce_scatter' with density 0.1, where ranks select from sums"),
    ({**VOTES, "exchange": "auto"}, "memory is 'scaled_momentum' and exchange is 'auto', where ranks select from sums"),
    ({**VOTES, "hierarchical": "auto"}, "memory is 'scaled_momentum' and hierarchical is 'auto', where ranks select"),
    ({"memory": "scaled_momentum", "exchange": "sparcml"}, "memory is 'scaled_momentum' and .* does not tell which"),
    ({**VOTES, "error_feedback": False}, "memory is 'scaled_momentum' and has no effect, since error_feedback is Fals"),
    ({**VOTES, "sparsifier": "none"}, "memory is 'scaled_momentum' and has no effect, since sparsifier 'none' sends a"),
    ({**VOTES, "min_elements": 5}, "min_elements is 5 and has no effect, since memory is 'scaled_momentum'"),
    ({**VOTES, "local": {"every": 4}}, "local is given and memory is 'scaled_momentum', which is a momentum of grad"),
    ({**VOTES, "mode": "auto"}, "mode is 'auto', and memory is 'scaled_momentum', which gives a momentum to compress"),
    ({**VOTES, "memory": "dgc"}, "value.magnitude is 'one', .* and memory is 'dgc', which would keep the difference"),
    ({**VOTES, "memory": {"name": "scaled_momentum", "decay": 1.0}}, "memory.decay is 1.0, which is not allowed"),
    ({"value": {"name": "sign", "magnitude": "one", "bucket_size": 8}, "error_feedback": False},
     "value.bucket_size is 8 and has no effect, since magnitude is 'one'"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), WRONG)
def test_wrong_settings_and_those_without_effect_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        Config.load(given)


def test_a_preset_loses_its_votes_with_its_memory():
    """Keywords that leave the memory without effect; and a job without error feedback may vote."""
    for change in ({"memory": "residual"}, {"sparsifier": "none"}):
        assert Config.load("sign_momentum", **change).value == Sign()
    assert Config.load("sign_momentum", error_feedback=False).value == Sign(magnitude="one")
