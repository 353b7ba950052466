"""The value codec ``uniform``. test_oracles.py compares its bytes with the oracle's."""

import numpy as np
import pytest

from hvd_deepreduce.codecs.value.uniform import Uniform
from hvd_deepreduce.ops import rotation, uniform
from tests.value.quantizers import AWKWARD, KEY, clipped, mean_of_draws, normals, round_trip


def steps_of(values, bits, bucket):
    ranges = [np.ptp(values[at : at + bucket].astype(np.float64)) for at in range(0, values.size, bucket)]
    return np.repeat(ranges, bucket)[: values.size] / (2**bits - 1)


def test_the_rotation_keeps_norms_and_depends_on_the_key_but_not_on_the_rank():
    values = normals(3000)
    rotated = rotation.rotate(values, 1024, *KEY[:3])
    assert rotated.size == 2048 + 1024 == rotation.rotated_count(3000, 1024)
    for at in (0, 1024, 2048):
        norm = np.linalg.norm(values[at : at + 1024])
        assert np.linalg.norm(rotated[at : at + 1024]) == pytest.approx(norm, rel=1e-6)
        assert np.abs(rotated[at : at + 1024]).max() < 5 * norm / 32 < np.abs(values[at : at + 1024]).max()
    assert not np.array_equal(rotated, rotation.rotate(values, 1024, 1, 2, 4))
    codec = Uniform(bits=4, rotate=True)
    sections = [codec.encode(values, None, KEY._replace(rank=rank))[0] for rank in (0, 1)]
    assert not np.array_equal(*sections)  # ranks round independently, and any of them can be decoded
    ours, theirs = (codec.decode(one, values.size, None, values.dtype, KEY) for one in sections)
    assert np.linalg.norm(ours - values) < 0.5 * np.linalg.norm(values) > np.linalg.norm(theirs - values)


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_unbiased_with_at_most_the_variance_of_qsparse_local_sgd(bits, rotate):
    """Section 2: beta = d / (2 s^2) for s-level, and 2 log2(2 d) / s^2 for rotated quantization."""
    codec, draws = Uniform(bits=bits, bucket_size=64, rotate=rotate), 1000
    values = normals(200, seed=3)
    mean, variance = mean_of_draws(codec, values, draws)
    step = steps_of(values, bits, 64) if not rotate else np.repeat(
        [2 * np.linalg.norm(values[at : at + 64].astype(np.float64)) for at in range(0, 200, 64)], 64
    )[:200] / (2**bits - 1)  # fmt: skip
    assert (np.abs(mean - values) <= 5 * step / 2 / np.sqrt(draws)).all()
    s = 2**bits - 1
    beta = 2 * np.log2(2 * 64) / s**2 if rotate else 64 / 2 / s**2
    assert codec.variance == pytest.approx(beta)
    for at in range(0, 200, 64):
        energy = np.sum(values[at : at + 64].astype(np.float64) ** 2)
        assert variance[at : at + 64].sum() <= beta * energy


@pytest.mark.parametrize("values", AWKWARD.values(), ids=AWKWARD.keys())
@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("bits", [1, 3, 12])
def test_fitted_ranges(values, rotate, bits):
    """They are those of linear regression; the error is never larger than the values."""
    codec = Uniform(bits=bits, bucket_size=128, rotate=rotate, fit_scale=True)
    _, decoded = round_trip(codec, values)
    limit, x = np.finfo(np.float32).max, clipped(values)
    for at in range(0, x.size, 128):
        bucket = x[at : at + 128].astype(np.float64)
        error = np.linalg.norm(decoded[at : at + 128] - bucket)
        assert error <= np.linalg.norm(bucket) * (1 + 1e-6) + 1e-43
    x = x[:128]
    if not x.size:
        return
    ranges, codes = uniform.encode(x, 128, 2**bits - 1, *KEY)
    low, high = uniform.fit_ranges(x, codes, ranges, 128, 2**bits - 1).astype(np.float64)
    c, y = codes.astype(np.float64), x.astype(np.float64)
    slope = np.cov(c, y, bias=True)[0, 1] / c.var() if x.size > 1 and c.var() else 0.0
    slope = max(slope, 0)
    expected = y.mean() - slope * c.mean()
    tolerance = 1e-6 * np.abs(y).max() + 1.5e-45
    assert low == pytest.approx(np.clip(expected, -limit, limit), abs=tolerance)
    assert high == pytest.approx(np.clip(expected + slope * (2**bits - 1), -limit, limit), abs=tolerance)


def test_the_range_is_fitted_under_error_feedback_where_the_variance_can_exceed_the_values():
    for settings, fitted in (
        ({"bits": 8}, False),
        ({"bits": 4}, True),  # 512 / (2 * 225) = 1.14
        ({"bits": 4, "bucket_size": 256}, False),
        ({"bits": 4, "rotate": True}, False),
        ({"bits": 2, "rotate": True}, True),
        ({"bits": 1, "fit_scale": False}, False),
        ({"bits": 1, "scaled": True}, False),
    ):
        assert bool(Uniform(**settings).under_feedback().fit_scale) is fitted, settings
        assert not Uniform(**settings).fit_scale  # without error feedback


def test_rotated_buckets_that_are_no_power_of_two_are_refused():
    section, _ = Uniform(rotate=True, bucket_size=64).encode(normals(100), None, KEY)
    section[4:8] = np.frombuffer(np.uint32(96).tobytes(), np.uint8)
    with pytest.raises(ValueError, match="buckets of a power of two, not of 96"):
        Uniform.decode(section, 100, None, np.dtype(np.float32), KEY)


@pytest.mark.parametrize("low, high", [(1.0, 0.0), (np.nan, 1.0), (0.0, np.inf), (-np.inf, 0.0)])
def test_impossible_ranges_are_refused(low, high):
    section, _ = Uniform().encode(normals(100), None, KEY)
    section[8:16] = np.array([low, high], np.float32).view(np.uint8)
    with pytest.raises(ValueError, match="out of range"):
        Uniform.decode(section, 100, None, np.dtype(np.float32), KEY)
