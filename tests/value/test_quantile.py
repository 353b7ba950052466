"""The value codec ``quantile``."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hvd_deepreduce.codecs.interfaces import RngKey
from hvd_deepreduce.codecs.value.quantile import Quantile
from hvd_deepreduce.ops import quantile
from tests.cases import AWKWARD
from tests.oracle import huffman as huffman_oracle
from tests.oracle import quantile as oracle
from tests.oracle import rans as rans_oracle

KEY = RngKey(1, 2, 3)
WITH_WIDE = {**AWKWARD, "wide": np.array([1e-38, -1e38] * 500, np.float32)}
F32 = np.dtype(np.float32)
few_floats = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1.0000001, 2.5, -2.5, 3e38, -1e-45, 1e-38, 1e-45])
any_floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


def round_trip(values, **config):
    codec = Quantile(**config)
    section, order = codec.encode(values, None, KEY)
    assert order is None
    decoded = codec.decode(section, values.size, None, values.dtype, KEY)
    assert decoded.dtype == np.float32
    assert decoded.size == values.size
    assert np.isfinite(decoded).all()
    return section, decoded


def normals(count, seed=0):
    random = np.random.default_rng(seed)
    return (random.standard_normal(count) * random.lognormal(size=count)).astype(np.float32)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    arrays(F32, st.integers(0, 70), elements=st.one_of(few_floats, any_floats)),
    st.sampled_from([2, 3, 4, 5, 7, 8, 16, 64, 256]),
    st.sampled_from(["mean", "middle"]),
)
def test_bytes_equal_the_oracle(values, buckets, center):
    section, decoded = round_trip(values, buckets=buckets, center=center)
    assert section.tobytes() == oracle.encode(values, buckets, center)
    if buckets > 2:
        assert (np.sign(decoded) == np.sign(values)).all()
    assert not (decoded * np.sign(values) < 0).any()


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    arrays(F32, st.integers(0, 70), elements=st.one_of(few_floats, any_floats)),
    st.sampled_from([2, 3, 4, 5, 7, 8, 16, 64, 256]),
    st.sampled_from(["mean", "middle"]),
)
def test_bytes_without_separate_signs_equal_the_oracle(values, buckets, center):
    section, decoded = round_trip(values, buckets=buckets, center=center, separate_signs=False)
    assert section.tobytes() == oracle.encode(values, buckets, center, separate_signs=False)
    if values.size:
        assert values.min() <= decoded.min() and decoded.max() <= values.max()


CODERS = {"none": (0, None), "huffman": (1, huffman_oracle.encode), "rans": (2, rans_oracle.encode)}


@pytest.mark.parametrize("entropy", CODERS)
@pytest.mark.parametrize("separate_signs", [False, True])
@pytest.mark.parametrize("center", ["mean", "middle"])
def test_bytes_of_many_values_equal_the_oracle(center, separate_signs, entropy):
    values = normals(3000)
    values[::3] = 0
    values[::11] = 0.25
    section, decoded = round_trip(
        values, buckets=100, center=center, separate_signs=separate_signs, entropy=entropy
    )
    assert section.tobytes() == oracle.encode(values, 100, center, separate_signs, *CODERS[entropy])
    assert section[3] == CODERS[entropy][0]
    assert (decoded == round_trip(values, buckets=100, center=center, separate_signs=separate_signs)[1]).all()


def test_without_separate_signs_only_values_of_the_bucket_of_zero_change_their_sign():
    values = normals(20_000)
    _, decoded = round_trip(values, buckets=128, separate_signs=False)
    reversed_signs = decoded * values < 0
    order = np.sort(values)
    assert 0 < reversed_signs.sum() < 20_000 / 128
    around = np.searchsorted(order, values[reversed_signs]) - np.searchsorted(order, 0)
    assert np.abs(around).max() < 20_000 / 128


@pytest.mark.parametrize("entropy", ["huffman", "rans"])
def test_entropy_coder_is_not_used_if_it_saves_nothing(entropy):
    values = normals(2**14)
    assert round_trip(values, entropy=entropy)[0].tobytes() == round_trip(values)[0].tobytes()


@pytest.mark.parametrize("center", ["mean", "middle"])
@pytest.mark.parametrize("buckets", [2, 16, 256, 1000, 65536])
def test_error_is_below_the_bound_of_theorem_2(buckets, center):
    values = normals(100_000)
    _, decoded = round_trip(values, buckets=buckets, center=center)
    error = ((decoded.astype(np.float64) - values) ** 2).sum()
    bound = values.size / (4 * buckets) * (float(values.min()) ** 2 + float(values.max()) ** 2)
    assert error <= bound


def test_mean_has_a_smaller_error_than_middle():
    values = normals(50_000)
    errors = [np.linalg.norm(round_trip(values, center=center)[1] - values) for center in ("mean", "middle")]
    assert errors[0] < errors[1]


def test_buckets_have_equal_numbers_of_values():
    values = normals(2**16, seed=4)
    section, _ = round_trip(values, buckets=128)
    header = 4 + 4 * 128
    fields = np.unpackbits(section[header:], bitorder="little").reshape(-1, 7)
    numbers = fields @ (1 << np.arange(7))
    counts = np.bincount(numbers, minlength=128)
    assert counts.min() >= 505
    assert counts.max() <= 519


def test_quantiles_equal_those_of_the_papers_sketch():
    """The papers use Yahoo's (now Apache) DataSketches. Its rank of each bucket's start must be the expected one."""
    sketch = pytest.importorskip("datasketches").kll_floats_sketch(1000)
    values = np.abs(normals(50_000, seed=6))
    _, codes, _ = quantile.encode(values, 64, False)
    sketch.update(values)
    begins = [float(values[codes == j].min()) for j in range(64)]
    ranks = np.array([sketch.get_rank(begin) for begin in begins])
    assert np.abs(ranks - np.arange(64) / 64).max() < 2 * sketch.normalized_rank_error(False)


def test_no_more_values_than_buckets_are_exact():
    values = normals(256)
    _, decoded = round_trip(values)
    assert (decoded == values).all()


def test_a_value_that_fills_a_bucket_is_exact():
    values = normals(10_000)
    values[:500] = 0.125
    values[500:1500] = 0
    _, decoded = round_trip(values, center="middle")
    assert (decoded[:500] == 0.125).all()
    assert (decoded[500:1500] == 0).all()


@pytest.mark.parametrize("values", WITH_WIDE.values(), ids=WITH_WIDE)
def test_awkward_values_are_exact(values):
    _, decoded = round_trip(values)
    assert (decoded == values).all()


def test_wide_values_keep_sign_and_range():
    values = (normals(5000) * np.float32(10.0) ** np.linspace(-37, 36, 5000)).astype(np.float32)
    for center in ("mean", "middle"):
        _, decoded = round_trip(values, center=center)
        assert (np.sign(decoded) == np.sign(values)).all()
        assert np.abs(decoded).max() <= np.abs(values).max()


def test_float64_is_rounded_and_clipped():
    values = np.array([1e300, -1e300, 1 / 3, 0], np.float64)
    _, decoded = round_trip(values)
    limit = np.finfo(np.float32).max
    assert (decoded == np.array([limit, -limit, 1 / 3, 0], np.float32)).all()


def test_only_negative_values_use_all_buckets():
    values = -np.abs(normals(4096))
    section, decoded = round_trip(values)
    assert section[:4].view(np.uint32)[0] == 256
    assert (decoded < 0).all()


@pytest.mark.parametrize(
    "settings_",
    [{"buckets": 1}, {"buckets": 65537}, {"center": "median"}, {"bucket": 2}, {"separate_signs": 1},
     {"entropy": "elias"}, {"entropy": "rans", "buckets": 257}],
)  # fmt: skip
def test_settings_out_of_range_are_refused(settings_):
    with pytest.raises(ValueError, match=next(iter(settings_))):
        Quantile(**settings_)


@pytest.mark.parametrize("entropy", CODERS)
def test_broken_sections_are_refused_or_valid(entropy):
    values = normals(300)
    values[::2] = 0
    section, _ = Quantile(buckets=20, entropy=entropy).encode(values, None, KEY)
    assert section[3] == CODERS[entropy][0]
    for end in range(section.size):
        with pytest.raises(ValueError, match=r"\w+ \w+"):
            Quantile.decode(section[:end].copy(), values.size, None, F32, KEY)
    random = np.random.default_rng(5)
    refused = 0
    for bit in [*range(64 * 8), *random.integers(0, section.size * 8, 500)]:
        broken = section.copy()
        broken[bit // 8] ^= 1 << (bit % 8)
        try:
            decoded = Quantile.decode(broken, values.size, None, F32, KEY)
            assert decoded.size == values.size
            assert np.isfinite(decoded).all()
        except ValueError:
            refused += 1
    assert refused
    near = (299, 301) if entropy == "none" else (250, 350)  # a code word more or less may fit into a byte
    for count in (0, 1, *near, 2**31):
        with pytest.raises(ValueError, match=r"\w+ \w+"):
            Quantile.decode(section, count, None, F32, KEY)
