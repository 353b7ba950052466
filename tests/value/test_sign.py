"""The value codec ``sign``."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hvd_deepreduce.codecs.value.sign import Sign
from hvd_deepreduce.config import Config
from hvd_deepreduce.pipeline import Pipeline
from hvd_deepreduce.wire.standalone import unpack
from tests.oracle import sign as oracle
from tests.value.quantizers import AWKWARD, KEY, check_broken, normals, round_trip, vectors


@given(vectors, st.sampled_from([1, 2, 7, 64, None]))
def test_bytes_are_the_oracles(values, bucket):
    section, decoded = round_trip(Sign(bucket_size=bucket), values)
    assert section.tobytes() == oracle.encode(values, bucket)
    assert np.array_equal(decoded, oracle.decode(section.tobytes(), values.size))


@pytest.mark.parametrize("count", [1023, 1024, 1025, 2048, 40_000])
@pytest.mark.parametrize("bucket", [None, 1500])
def test_sums_are_taken_in_the_documented_order(count, bucket):
    # Magnitudes from 1e-12 to 1e12, so that another order gives another sum.
    random = np.random.default_rng(count)
    values = (random.standard_normal(count) * 10.0 ** random.uniform(-12, 12, count)).astype(np.float32)
    assert round_trip(Sign(bucket_size=bucket), values)[0].tobytes() == oracle.encode(values, bucket)


def test_sum_of_more_than_1024_blocks():
    values = normals(1024 * 1024 + 5)
    assert round_trip(Sign(), values)[0].tobytes() == oracle.encode(values, None)


@pytest.mark.parametrize("values", AWKWARD.values(), ids=AWKWARD.keys())
def test_awkward_values(values):
    section, decoded = round_trip(Sign(), values)
    limit = np.finfo(np.float32).max
    x = np.clip(values, -limit, limit).astype(np.float32)
    assert section.tobytes() == oracle.encode(x, None)
    if x.size:
        scale = np.abs(x.astype(np.float64)).mean()
        np.testing.assert_allclose(decoded, np.where(x < 0, -scale, scale), rtol=1e-6, atol=1e-45)


@pytest.mark.parametrize("bucket", [64, None])
def test_loss_equals_the_documented_share(bucket):
    values = normals(6400)
    _, decoded = round_trip(Sign(bucket_size=bucket), values)
    for at in range(0, values.size, bucket or values.size):
        v = values[at : at + (bucket or values.size)].astype(np.float64)
        lost = np.sum((v - decoded[at : at + v.size]) ** 2)
        share = 1 - np.abs(v).sum() ** 2 / (v.size * np.sum(v**2))
        assert lost == pytest.approx(share * np.sum(v**2), rel=1e-5)
        assert share < 1


def test_error_feedback_sends_the_whole_gradient_over_many_steps():
    """The sum of the decoded values over many steps stays close to the sum of the gradients (EF-SignSGD)."""
    gradient = normals(2000)
    pipeline = Pipeline(Config.load(sparsifier="none", value="sign"))
    residual, sent, out = np.zeros_like(gradient), np.zeros(gradient.size), np.empty_like(gradient)
    for step in range(400):
        container = unpack(pipeline.encode(gradient, residual, KEY._replace(step=step)))
        pipeline.decode([container], out)
        sent += out
    np.testing.assert_allclose(sent + residual, 400.0 * gradient, rtol=1e-3, atol=1e-2)
    assert np.linalg.norm(sent / 400 - gradient) < 0.2 * np.linalg.norm(gradient)


def test_size_is_as_documented():
    assert round_trip(Sign(), normals(8000))[0].size == 8 + 4 + 1000
    assert round_trip(Sign(bucket_size=1000), normals(8000))[0].size == 8 + 32 + 1000


def test_broken_sections():
    assert check_broken(Sign(bucket_size=64), normals(500)) > 30


def test_settings_are_checked():
    for wrong in ({"bucket_size": 0}, {"bucket_size": 2**31 + 1}, {"scale": 1}):
        with pytest.raises(ValidationError):
            Sign(**wrong)
