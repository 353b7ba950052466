"""Error feedback keeps the residual bounded under every shipped config and every pair of a sparsifier and a codec."""

import numpy as np
import pytest
from sklearn.datasets import load_digits

from hvd_deepreduce import Config, ConfigError
from hvd_deepreduce.codecs.interfaces import RngKey, index_codecs, joint_codecs, sparsifiers, value_codecs
from hvd_deepreduce.config import presets
from hvd_deepreduce.pipeline import Pipeline
from tests.selection import thorough

STEPS = 300
NUMEL = 2500


def normal(rng, step):
    return rng.standard_normal(NUMEL)


def heavy_tailed(rng, step):
    """Student's t with two degrees of freedom has no variance."""
    return rng.standard_t(2, NUMEL)


class Digits:
    """The gradients of softmax regression on handwritten digits, 16 random products of pixels added; with the same
    support in each step and in rows of very different sizes."""

    def __init__(self):
        images, self.labels = load_digits(return_X_y=True)
        pixels = images / 16
        pairs = np.random.default_rng(1).integers(0, 64, (2, NUMEL // 10 - 64))
        self.inputs = np.concatenate([pixels, pixels[:, pairs[0]] * pixels[:, pairs[1]]], axis=1)
        self.weights = np.zeros((self.inputs.shape[1], 10))

    def __call__(self, rng, step):
        some = rng.integers(0, len(self.labels), 32)
        scores = np.exp(self.inputs[some] @ self.weights)
        scores /= scores.sum(1, keepdims=True)
        scores[np.arange(32), self.labels[some]] -= 1
        gradient = self.inputs[some].T @ scores / 32
        self.weights -= 0.1 * gradient
        return gradient.reshape(-1)


GRADIENTS = {"normal": lambda: normal, "heavy_tailed": lambda: heavy_tailed, "digits": Digits}


def check(config, gradients):
    """The largest residual, in units of the largest gradient so far, stops growing."""
    pipeline, rng = Pipeline(config), np.random.default_rng(5)
    residual, velocity, largest, ratios = np.zeros(NUMEL, np.float32), np.zeros(NUMEL, np.float32), 0.0, []
    first = config.density_schedule.end if config.density_schedule else 0
    for step in range(STEPS):
        gradient = gradients(rng, step).astype(np.float32)
        pipeline.encode(gradient, residual, RngKey(0, 3, first + step), velocity=velocity)
        largest = max(largest, float(np.linalg.norm(gradient)))
        ratios.append(float(np.linalg.norm(residual)) / largest)
    third = STEPS // 3
    assert max(ratios[-third:]) <= 1.3 * max(ratios[third:-third]) + 0.6, ratios[::20]


WITH_FEEDBACK = [name for name in presets.names() if Config.load(name).error_feedback]


@pytest.mark.parametrize(
    ("name", "gradients"),
    [
        pytest.param(name, gradients, marks=() if at % 6 == kind else thorough)
        for at, name in enumerate(WITH_FEEDBACK)
        for kind, gradients in enumerate(GRADIENTS)
    ],
)
def test_presets(name, gradients):
    config = Config.load(name)
    if config.exchange.implementation:  # such an exchange rounds the values that it is given to a codec's
        config = Config.load(sparsifier=config.sparsifier, value="raw")
    check(config, GRADIENTS[gradients]())


SETTINGS = {
    "threshold": {"threshold": 2.0}, "topk_capped": {"cap": 25}, "block_topk": {"block": 5}, "sampled_topk": {},
    "chunk_topk": {"chunk": 100},
}  # fmt: skip
CODECS = (
    [{"value": name} for name in value_codecs.by_name]
    + [{"index": name, "value": "raw"} for name in index_codecs.by_name]
    + [{"joint": name} for name in joint_codecs.by_name]
    + [{"value": {"name": "qsgd", "bits": 2, "bucket_size": 4096, "norm": norm}} for norm in ("max", "l2")]
    + [{"value": {"name": "ternary", "bucket_size": None, "clip": clip}} for clip in (None, 2.5)]
    + [{"value": {"name": "uniform", "bits": 1, "bucket_size": 4096, "rotate": rotate}} for rotate in (False, True)]
    + [{"value": {"name": "quantile", "buckets": 4, "center": c, "separate_signs": False}} for c in ("mean", "middle")]
    + [{"value": {"name": "quantile", "buckets": buckets, "splits": "lloyd"}} for buckets in (2, 4)]
    + [{"joint": {"name": name, "center": "middle", "groups": 1}} for name in ("sketchml", "skcompress")]
)


@pytest.mark.parametrize(
    ("sparsifier", "number"),
    [
        pytest.param(name, at, marks=() if name == "topk" and at % 2 or codec == {"value": "qsgd"} else thorough)
        for name in sparsifiers.by_name
        for at, codec in enumerate(CODECS)
    ],
)
def test_pairs(sparsifier, number):
    config = Config.load(CODECS[number], sparsifier={"name": sparsifier, **SETTINGS.get(sparsifier, {})})
    check(config, list(GRADIENTS.values())[number % 3]())


@pytest.mark.parametrize("gradients", GRADIENTS)
@pytest.mark.parametrize("nesterov", [False, True])
def test_dgc(gradients, nesterov):
    """Its residual gets velocities, which are up to 1 / (1 - momentum) times as large as gradients."""
    for sparsifier in ("topk", "chunk_topk"):
        check(
            Config.load(
                memory={"name": "dgc", "momentum": 0.5, "nesterov": nesterov},
                sparsifier={"name": sparsifier, "density": 0.05},
            ),
            GRADIENTS[gradients](),
        )


def test_a_codec_that_loses_more_than_it_sends_is_found():
    """The check itself: without the fit, the variance of these settings exceeds the values."""
    config = Config.load(sparsifier="none", value={"name": "qsgd", "bits": 2, "norm": "l2", "fit_scale": False})
    with pytest.raises(AssertionError):
        check(config, normal)


def test_values_at_other_indices_and_error_feedback_exclude_each_other():
    naive = {"index": {"name": "bloom", "policy": "naive"}, "value": "raw"}
    with pytest.raises(ConfigError, match="value can be decoded at the index of another element.* Set error_feedback"):
        Config.load(naive)
    assert not Config.load("dr_bf_naive").error_feedback and not Config.load(naive, error_feedback=False).error_feedback
